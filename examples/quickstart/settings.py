"""The numbers of the job: sizes, updates, optimiser. Quick to import."""

from __future__ import annotations

from dataclasses import dataclass

# Chosen so that the whole job takes at most 15 minutes on two CPU cores; a GPU gets through more
# in less. One number for both recipes: their tables are compared after equal work.
UPDATES = {"cpu": 2000, "cuda": 8000}


@dataclass(frozen=True)
class Settings:
    """All that decides the result; a work folder belongs to one setting of these."""

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
