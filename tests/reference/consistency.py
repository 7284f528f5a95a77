"""Losses of two passes in the notation of their papers, in float64, everything held at once."""

import torch

from tests.reference.mixture import smoothed_nll


def kl(log_p, log_q):
    """KL(p||q) of each row."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def r_drop(first, second, targets, alpha, label_smoothing=0.0, ignore_index=None):
    """(objective, mean NLL) from log-probabilities (T, N); arXiv 2106.14448."""
    losses, nlls = zip(
        *(smoothed_nll(p, targets, label_smoothing, ignore_index) for p in (first, second))
    )
    kept = torch.ones_like(targets, dtype=torch.bool)
    if ignore_index is not None:
        kept = targets != ignore_index
    divergence = (kl(first[kept], second[kept]) + kl(second[kept], first[kept])).sum() / 2
    return losses[0] + losses[1] + alpha * divergence, (nlls[0] + nlls[1]) / 2


def simcut(full, cut, targets, alpha, label_smoothing=0.0, ignore_index=None):
    """(objective, NLL of the full pass) from log-probabilities (T, N)."""
    loss, nll = smoothed_nll(full, targets, label_smoothing, ignore_index)
    kept = torch.ones_like(targets, dtype=torch.bool)
    if ignore_index is not None:
        kept = targets != ignore_index
    return loss + alpha * kl(full[kept], cut[kept]).sum(), nll
