"""Translation architectures: fairseq's Transformer with controlled embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Optional

from fairseq.models.transformer import TransformerConfig, TransformerModelBase, transformer_legacy
from torch import nn

from spectral_fairseq.embeddings import Table
from spectral_fairseq.plugin.models.architectures import (
    FillSizes,
    add_flags_without_defaults,
    register,
)
from spectral_fairseq.plugin.models.decoder import SpectralTransformerDecoder
from spectral_fairseq.plugin.models.flat_config import FlatTransformerConfig, to_namespace
from spectral_fairseq.plugin.models.options import (
    IN_A_TRANSFORMER,
    SpectralOptions,
    has_own_output,
    refuse_unsupported,
)
from spectral_fairseq.plugin.models.sharing import check_sharing
from spectral_fairseq.plugin.models.tables import build_table

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
    def build_model(cls, cfg: Any, task: Any) -> SpectralTransformer:
        """Build a model; fairseq calls this.

        Raises:
            UnsupportedError: a feature of fairseq that the chosen table or head cannot take.
            ConfigurationError: flags that contradict each other.
        """
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
        if has_own_output(cfg) and (shared or str(cfg.embedding_tables) == "all"):
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
    ("transformer_mos", {"output_head": "mos", **IN_A_TRANSFORMER}),
):
    register(_name, SpectralTransformer, SpectralTransformerConfig, _preset, SIZES)
