"""Activation regularisation of a recurrent network's outputs.

Merity, McCann, Socher: "Revisiting Activation Regularization for Language RNNs", 2017,
https://arxiv.org/abs/1708.01009, with the means of squares with which the AWD-LSTM was trained.
For outputs h_t, t = 1..T, of d_h dimensions,

    AR  = mean(h_t^2),             h after output dropout, over positions, streams and dimensions
    TAR = mean((h_{t+1} - h_t)^2), h before output dropout, likewise

Flags: ``--activation-regularization`` 2, ``--temporal-activation-regularization`` 1.
In order: ``plugin/awd_lstm.py: AWDLSTMDecoder.read``, ``activation_regularization``,
    ``temporal_activation_regularization``.
"""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from spectral_fairseq.functional.precision import widened


def activation_regularization(dropped: Tensor, counted: Optional[Tensor] = None) -> Tensor:
    """Return AR, a scalar in float32 or wider.

    Args:
        dropped: h after dropout, shape (B, T, d_h).
        counted: shape (B, T), false at padding; ``None`` counts every position.
    """
    return _mean_of_squares(dropped, counted)


def temporal_activation_regularization(raw: Tensor, counted: Optional[Tensor] = None) -> Tensor:
    """Return TAR, a scalar in float32 or wider; 0 for segments of one position.

    Args:
        raw: h before dropout, shape (B, T, d_h).
        counted: shape (B, T), false at padding; a difference counts where both of its positions
            do.
    """
    if counted is not None:
        counted = counted[:, 1:] & counted[:, :-1]
    return _mean_of_squares(raw[:, 1:] - raw[:, :-1], counted)


def _mean_of_squares(values: Tensor, counted: Optional[Tensor]) -> Tensor:
    squares = widened(values).square()
    if counted is None:
        return squares.sum() / max(squares.numel(), 1)
    positions = counted.sum().clamp(min=1)
    return (squares.sum(-1) * counted).sum() / (positions * values.size(-1))
