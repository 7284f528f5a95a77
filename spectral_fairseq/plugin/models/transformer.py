"""Translation architectures: fairseq's Transformer with controlled embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional

from fairseq.models import register_model
from fairseq.models.transformer import TransformerConfig, TransformerModelBase
from fairseq.models.transformer import transformer_legacy as host
from torch import nn

from spectral_fairseq.plugin.models.decoder import SpectralTransformerDecoder
from spectral_fairseq.plugin.models.flat_config import FlatTransformerConfig, to_namespace
from spectral_fairseq.plugin.models.options import (
    SpectralOptions,
    has_own_output,
    refuse_unsupported,
    with_defaults,
)
from spectral_fairseq.plugin.models.presets import add_flags_without_defaults, register_presets
from spectral_fairseq.plugin.models.tables import build_table

# Our presets carry the names of fairseq's own, whose sizes they take.
SIZES: Dict[str, Callable[[Any], None]] = {
    "": host.base_architecture,
    "_iwslt_de_en": host.transformer_iwslt_de_en,
    "_wmt_en_de": host.transformer_wmt_en_de,
    "_vaswani_wmt_en_de_big": host.transformer_vaswani_wmt_en_de_big,
    "_wmt_en_de_big_t2t": host.transformer_wmt_en_de_big_t2t,
}


@dataclass
class SpectralTransformerConfig(SpectralOptions, FlatTransformerConfig):  # type: ignore[misc,valid-type]
    """Every flag of the installed fairseq's Transformer, and ours."""


class SpectralTransformer(TransformerModelBase):
    """An encoder-decoder Transformer whose tables and output layer follow our flags."""

    add_args = classmethod(add_flags_without_defaults)

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> SpectralTransformer:
        """fairseq's hook.

        Raises:
            UnsupportedError: a feature of the host that the chosen table cannot take.
            ConfigurationError: flags that contradict each other.
        """
        options = to_namespace(cls, cfg)
        refuse_unsupported(options)
        return super().build_model(TransformerConfig.from_namespace(options), task)

    @classmethod
    def build_embedding(
        cls, cfg: Any, dictionary: Any, embed_dim: int, path: Optional[str] = None
    ) -> nn.Module:
        """fairseq's hook, called once for each table of look-ups."""
        shared = cfg.share_all_embeddings or getattr(cfg, "merge_src_tgt_embed", False)
        if has_own_output(cfg) and (shared or str(cfg.embedding_tables) == "all"):
            return build_table(cfg, dictionary, embed_dim, path)
        return super().build_embedding(cfg, dictionary, embed_dim, path)

    @classmethod
    def build_decoder(cls, cfg: Any, tgt_dict: Any, embed_tokens: Any) -> nn.Module:
        """fairseq's hook."""
        if has_own_output(cfg) and cfg.share_decoder_input_output_embed:
            if not hasattr(embed_tokens, "operands"):  # shared two ways, not with the encoder
                embed_tokens = build_table(
                    cfg, tgt_dict, cfg.decoder.embed_dim, cfg.decoder.embed_path
                )
        return SpectralTransformerDecoder(
            cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention
        )


TransformerSCConfig = with_defaults(
    SpectralTransformerConfig, "TransformerSCConfig", embedding_type="svd"
)
TransformerMoSConfig = with_defaults(
    SpectralTransformerConfig, "TransformerMoSConfig", output_head="mos"
)


@register_model("transformer_sc", dataclass=TransformerSCConfig)
class TransformerSC(SpectralTransformer):
    """``--arch transformer_sc*``: SVD tables unless told otherwise."""


@register_model("transformer_mos", dataclass=TransformerMoSConfig)
class TransformerMoS(SpectralTransformer):
    """``--arch transformer_mos*``: a mixture of softmaxes unless told otherwise."""


register_presets("transformer_sc", SIZES)
register_presets("transformer_mos", SIZES)
