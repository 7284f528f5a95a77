"""Settings of a language model: sizes, epochs, optimiser. Importing this module is quick."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LanguageModelSettings:
    """Everything besides a method's own flags that determines a result.

    Sizes, dropouts and streams are made for two CPU cores; optimiser, clipping, weight decay and
    segment sampling are those of the published AWD-LSTM.
    """

    seed: int
    epochs: int
    updates: int  # training stops after so many, or after the epochs; 0 for no limit
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


@dataclass(frozen=True)
class BottleneckSettings(LanguageModelSettings):
    """A smaller model for the measurement of the softmax bottleneck.

    It has no dropout, because it never sees a word twice at this budget, and is trained with Adam.
    """

    dim: int = 64
    hidden: int = 128
    layers: int = 2
    dropout: float = 0.0
    input_dropout: float = 0.0
    hidden_dropout: float = 0.0
    word_dropout: float = 0.0
    weight_drop: float = 0.0
    learning_rate: float = 0.01
    clip_norm: float = 1.0
