"""Naive form of dynamic evaluation: the update rule written out for each tensor in turn."""

import torch


def root_mean_squares(gradients):
    """``gradients``: one list of tensors for each training batch."""
    batches = len(gradients)
    return [torch.sqrt(sum(g * g for g in each) / batches) for each in zip(*gradients)]


def update(weights, trained, gradients, rms, rate, decay, epsilon):
    """New weights, as a list."""
    mean = sum(r.mean() for r in rms) / len(rms)
    new = []
    for w, w0, g, r in zip(weights, trained, gradients, rms):
        rates = torch.minimum(r / mean, torch.tensor(1 / decay, dtype=r.dtype))
        new.append(w + decay * rates * (w0 - w) - rate * g / (r + epsilon))
    return new
