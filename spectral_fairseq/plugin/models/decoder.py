"""fairseq's Transformer decoder with an output layer of ours."""

from __future__ import annotations

from typing import Any

from fairseq.models.transformer import TransformerDecoderBase

from spectral_fairseq.embeddings.svd import SVDEmbedding
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.heads.softmax import SoftmaxHead
from spectral_fairseq.plugin.models.tables import build_svd_table


class SpectralTransformerDecoder(TransformerDecoderBase):
    """Differs from its base only in ``output_projection``."""

    def build_output_projection(self, cfg: Any, dictionary: Any, embed_tokens: Any) -> None:
        """fairseq's hook, called while the decoder is built."""
        if str(cfg.embedding_type) == "plain":
            super().build_output_projection(cfg, dictionary, embed_tokens)
        elif self.share_input_output_embed and isinstance(embed_tokens, SVDEmbedding):
            if embed_tokens.embedding_dim != self.output_embed_dim:
                raise ConfigurationError(
                    "a shared table as wide as the decoder's output",
                    f"a table of width {embed_tokens.embedding_dim} and an output of width "
                    f"{self.output_embed_dim}",
                    "Give --decoder-input-dim and --decoder-output-dim the same value, or do not "
                    "share the embeddings.",
                )
            self.output_projection = SoftmaxHead(embed_tokens)
        else:
            self.output_projection = SoftmaxHead(
                build_svd_table(cfg, dictionary, self.output_embed_dim)
            )
