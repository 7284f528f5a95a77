"""fairseq's Transformer decoder with an output layer of ours."""

from __future__ import annotations

from typing import Any

from fairseq.models.transformer import TransformerDecoderBase

from spectral_fairseq.embeddings.svd import SVDEmbedding
from spectral_fairseq.heads.softmax import SoftmaxHead
from spectral_fairseq.plugin.models.tables import build_svd_table


class SpectralTransformerDecoder(TransformerDecoderBase):
    """Differs from its base only in ``output_projection``."""

    def build_output_projection(self, cfg: Any, dictionary: Any, embed_tokens: Any) -> None:
        """fairseq's hook, called while the decoder is built."""
        if str(cfg.embedding_type) == "plain":
            super().build_output_projection(cfg, dictionary, embed_tokens)
        elif self.share_input_output_embed and isinstance(embed_tokens, SVDEmbedding):
            self.output_projection = SoftmaxHead(embed_tokens)
        else:
            self.output_projection = SoftmaxHead(
                build_svd_table(cfg, dictionary, self.output_embed_dim)
            )
