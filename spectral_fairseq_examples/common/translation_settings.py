"""The numbers of a translation job: sizes, updates, optimiser. Quick to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TranslationSettings:
    """All that decides a result besides a recipe's own flags.

    A work folder belongs to one setting of these.
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
