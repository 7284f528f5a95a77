"""fairseq's Transformer with tables and output layers of this package.

``--arch transformer_{sc,wn,mos}``, with fairseq's sizes behind the name.
"""

# No "from __future__ import annotations" here: fairseq and omegaconf read the field types.
from dataclasses import dataclass
from typing import Any, Dict, Optional

from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerModelBase,
    transformer_legacy,
)
from fairseq.modules import BaseLayer
from torch import nn

from spectral_fairseq.embeddings import Table
from spectral_fairseq.errors import check_alike
from spectral_fairseq.heads import HeadSpec
from spectral_fairseq.plugin.flat_transformer import FlatTransformerConfig, to_namespace
from spectral_fairseq.plugin.registry import FillSizes, add_flags_without_defaults, register
from spectral_fairseq.plugin.table_and_head import (
    IN_A_TRANSFORMER,
    SpectralOptions,
    build_head,
    build_table,
    check_sharing,
    has_own_look_up,
    has_own_output,
    refuse_unsupported,
)


class SpectralTransformerDecoder(TransformerDecoderBase):
    """Differs from its base class only in ``output_projection``."""

    def build_output_projection(self, cfg: Any, dictionary: Any, embed_tokens: Any) -> None:
        """Build the output layer; fairseq calls this while it builds the decoder.

        Raises:
            ConfigurationError: the hidden states are not as wide as the output layer's table.
        """
        if not has_own_output(cfg):
            super().build_output_projection(cfg, dictionary, embed_tokens)
            return
        if self.project_out_dim is None:
            widths = {
                "--decoder-output-dim": self.output_embed_dim,
                "--decoder-embed-dim": cfg.decoder.embed_dim,
            }
            remedy = "Make them equal, or leave out --tie-adaptive-weights, which needs that."
            check_alike("one width of hidden states and table", widths, remedy)
        shared = embed_tokens if self.share_input_output_embed else None
        spec = HeadSpec(self.output_embed_dim)
        self.output_projection = build_head(cfg, dictionary, spec, shared)
        # fairseq adds the layers of --base-layers here, which have no other place to be added at.
        for index in range(cfg.base_layers):
            place = (index + 1) * cfg.decoder.layers // (cfg.base_layers + 1)
            self.layers.insert(place, BaseLayer(cfg))


# An architecture has the sizes of fairseq's own with the same suffix.
SIZES: Dict[str, FillSizes] = {
    "": transformer_legacy.base_architecture,
    "_iwslt_de_en": transformer_legacy.transformer_iwslt_de_en,
    "_wmt_en_de": transformer_legacy.transformer_wmt_en_de,
    "_vaswani_wmt_en_de_big": transformer_legacy.transformer_vaswani_wmt_en_de_big,
    "_wmt_en_de_big_t2t": transformer_legacy.transformer_wmt_en_de_big_t2t,
}


@dataclass
class SpectralTransformerConfig(SpectralOptions, FlatTransformerConfig):
    """Every flag of the installed fairseq's Transformer and of this package's tables and heads."""


class SpectralTransformer(TransformerModelBase):
    """An encoder-decoder Transformer whose tables and output layer follow the flags."""

    add_args = classmethod(add_flags_without_defaults)

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "SpectralTransformer":
        """Build a model; fairseq calls this."""
        options = to_namespace(cls, cfg)
        refuse_unsupported(options)
        check_sharing(options, task)
        return super().build_model(TransformerConfig.from_namespace(options), task)

    @classmethod
    def build_embedding(
        cls, cfg: Any, dictionary: Any, embed_dim: int, path: Optional[str] = None
    ) -> nn.Module:
        """Build a look-up table; fairseq calls this once for each of them."""
        shared = cfg.share_all_embeddings or getattr(cfg, "merge_src_tgt_embed", False)
        if has_own_look_up(cfg, shared):
            return build_table(cfg, dictionary, embed_dim, path)
        return super().build_embedding(cfg, dictionary, embed_dim, path)

    @classmethod
    def build_decoder(cls, cfg: Any, tgt_dict: Any, embed_tokens: Any) -> nn.Module:
        """Build the decoder; fairseq calls this."""
        if has_own_output(cfg) and cfg.share_decoder_input_output_embed:
            if not isinstance(embed_tokens, Table):  # not shared with the encoder
                embed_tokens = build_table(
                    cfg, tgt_dict, cfg.decoder.embed_dim, cfg.decoder.embed_path
                )
        return SpectralTransformerDecoder(
            cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention
        )


for _name, _preset in (
    ("transformer_sc", {"embedding_type": "svd", **IN_A_TRANSFORMER}),
    ("transformer_wn", {"embedding_type": "weight-norm", **IN_A_TRANSFORMER}),
    ("transformer_mos", {"output_head": "mos", **IN_A_TRANSFORMER}),
):
    register(_name, SpectralTransformer, SpectralTransformerConfig, _preset, SIZES)
