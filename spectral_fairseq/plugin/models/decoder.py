"""fairseq's Transformer decoder with an output layer of this package."""

from __future__ import annotations

from typing import Any

from fairseq.models.transformer import TransformerDecoderBase

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.heads import HeadSpec
from spectral_fairseq.plugin.models.options import has_own_output
from spectral_fairseq.plugin.models.tables import build_head


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
        if self.project_out_dim is None and cfg.decoder.embed_dim != self.output_embed_dim:
            raise ConfigurationError(
                "--decoder-output-dim to be --decoder-embed-dim, with --tie-adaptive-weights",
                f"{self.output_embed_dim} and {cfg.decoder.embed_dim}",
                "Make them equal, or leave out --tie-adaptive-weights, with which fairseq does not "
                "project the hidden states.",
            )
        shared = embed_tokens if self.share_input_output_embed else None
        spec = HeadSpec(self.output_embed_dim)
        self.output_projection = build_head(cfg, dictionary, spec, shared)
