"""fairseq's Transformer language model with tables and output layers of this package.

``--arch transformer_lm_{sc,wn,mos}``.
"""

# No "from __future__ import annotations" here: fairseq and omegaconf read the field types.
from dataclasses import dataclass
from typing import Any, Dict, Optional

from fairseq.models import transformer_lm
from fairseq.models.transformer import TransformerConfig
from omegaconf import II
from torch import nn

from spectral_fairseq.options import option
from spectral_fairseq.plugin.flat_transformer import to_namespace
from spectral_fairseq.plugin.registry import FillSizes, add_flags_without_defaults, register
from spectral_fairseq.plugin.table_and_head import (
    IN_A_TRANSFORMER,
    SpectralOptions,
    build_table,
    has_own_look_up,
    has_own_output,
    refuse_unsupported,
)
from spectral_fairseq.plugin.transformer import SpectralTransformerDecoder

# fairseq's ``transformer_lm`` itself has the defaults of its flags and no function for its sizes.
GPT: Dict[str, FillSizes] = {"_gpt": transformer_lm.transformer_lm_gpt}


@dataclass
class SpectralTransformerLMConfig(SpectralOptions, transformer_lm.TransformerLanguageModelConfig):
    """Every flag of fairseq's ``transformer_lm`` and of this package's tables and heads.

    The table and the output are as wide as the layers unless told otherwise. In fairseq they keep
    512 dimensions whatever ``decoder_embed_dim`` is, except under a named ``--arch``.
    """

    decoder_input_dim: int = option(
        II("model.decoder_embed_dim"),
        "width of the table of look-ups; --decoder-embed-dim if unset",
    )
    decoder_output_dim: int = option(
        II("model.decoder_embed_dim"),
        "width of the output layer's table; --decoder-embed-dim if unset",
    )


class SpectralTransformerLM(transformer_lm.TransformerLanguageModel):
    """A Transformer language model whose table and output layer follow the flags."""

    add_args = classmethod(add_flags_without_defaults)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "SpectralTransformerLM":
        """Build a model; fairseq calls this."""
        options = to_namespace(cls, args)
        refuse_unsupported(options)
        if not has_own_output(options):
            return super().build_model(options, task)
        if options.decoder_layers_to_keep:
            options.decoder_layers = len(options.decoder_layers_to_keep.split(","))
        if getattr(options, "max_target_positions", None) is None:
            options.max_target_positions = getattr(
                options, "tokens_per_sample", transformer_lm.DEFAULT_MAX_TARGET_POSITIONS
            )
        config = TransformerConfig.from_namespace(options)
        table = cls.build_embedding(config, task.source_dictionary, options.decoder_input_dim)
        return cls(
            SpectralTransformerDecoder(config, task.target_dictionary, table, no_encoder_attn=True)
        )

    @classmethod
    def build_embedding(
        cls, args: Any, dictionary: Any, embed_dim: int, path: Optional[str] = None
    ) -> nn.Module:
        """Build the look-up table; fairseq calls this."""
        if has_own_look_up(args, args.share_decoder_input_output_embed):
            return build_table(args, dictionary, embed_dim, path)
        return super().build_embedding(args, dictionary, embed_dim, path)


for _name, _preset, _sizes in (
    ("transformer_lm_sc", {"embedding_type": "svd", **IN_A_TRANSFORMER}, GPT),
    ("transformer_lm_wn", {"embedding_type": "weight-norm", **IN_A_TRANSFORMER}, GPT),
    ("transformer_lm_mos", {"output_head": "mos", **IN_A_TRANSFORMER}, {}),
):
    register(_name, SpectralTransformerLM, SpectralTransformerLMConfig, _preset, _sizes)
