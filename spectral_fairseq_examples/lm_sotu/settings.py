"""The numbers of a language-model job: sizes, epochs, optimiser. Quick to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LanguageModelSettings:
    """All that decides a result besides a method's own flags.

    Sizes, dropouts and streams are made for two CPU cores; optimiser, clipping, weight decay and
    segment sampling are those of the published AWD-LSTM.
    """

    seed: int
    epochs: int
    updates: int  # at most, however many epochs they are; 0 for as many as that takes
    device: str
    corpus: str
    dim: int = 128
    hidden: int = 256
    layers: int = 3
    dropout: float = 0.2
    input_dropout: float = 0.2
    hidden_dropout: float = 0.1
    word_dropout: float = 0.05
    weight_drop: float = 0.2
    learning_rate: float = 30.0
    weight_decay: float = 1.2e-6
    clip_norm: float = 0.25
    streams: int = 20
    valid_streams: int = 10
    segment: int = 35
