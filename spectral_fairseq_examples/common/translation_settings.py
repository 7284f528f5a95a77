"""Settings of a translation model: sizes, updates, optimiser. Importing this module is quick."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TranslationSettings:
    """Everything besides a recipe's own flags that determines a result.

    A work folder holds the results of one such setting.
    """

    seed: int
    updates: int
    device: str
    corpus: str
    vocabulary: int = 6000
    dim: int = 128
    ffn_dim: int = 256
    layers: int = 2
    attention_heads: int = 4
    dropout: float = 0.1
    label_smoothing: float = 0.1
    learning_rate: float = 2e-3
    warmup_updates: int = 200
    clip_norm: float = 1.0
    max_tokens: int = 1600
    beam: int = 5

    def checkpoint_bytes(self) -> int:
        """About what the checkpoints of a training take: two, and one that is being written."""
        layer = 12 * self.dim**2 + 4 * self.dim * self.ffn_dim  # of the encoder and the decoder
        parameters = self.vocabulary * self.dim + self.layers * layer
        return 40 * parameters  # three times a parameter and Adam's two moments, in float32
