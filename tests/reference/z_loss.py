"""Naive forms of the z-loss and of the soft cap: all scores at once, token by token."""

import torch

from tests.reference.mixture import smoothed_nll


def softcapped(scores, softcap):
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def losses(scores, targets, z_loss=0.0, softcap=None, label_smoothing=0.0, ignore_index=None):
    """(loss, plain loss, nll, squares), each summed over tokens, of scores (T, N)."""
    scores = softcapped(scores, softcap)
    plain, nll = smoothed_nll(scores.log_softmax(-1), targets, label_smoothing, ignore_index)
    squares = sum(
        (row.exp().sum().log() ** 2 for row, y in zip(scores, targets) if y != ignore_index),
        scores[:0].sum(),
    )
    return plain + z_loss * squares, plain, nll, squares
