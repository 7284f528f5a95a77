"""Naive forms of the mixture outputs and of their loss: everything held at once."""

import torch


def log_mixture(contexts, log_prior, matrix, bias=None):
    """contexts (*, K, d), log_prior (*, K), matrix (N, d), bias (N,) -> (*, N)."""
    scores = torch.nn.functional.linear(contexts, matrix, bias)  # [*, K, N]
    return torch.logsumexp(log_prior.unsqueeze(-1) + torch.log_softmax(scores, -1), -2)


def log_mixture_of_contexts(contexts, log_prior, matrix, bias=None):
    mixed = (log_prior.exp().unsqueeze(-1) * contexts).sum(-2)
    return torch.log_softmax(torch.nn.functional.linear(mixed, matrix, bias), -1)


def smoothed_nll(log_probabilities, targets, label_smoothing=0.0, ignore_index=None):
    """(loss_sum, nll_sum) of (T, N) log-probabilities; the smoothed mass is spread over N - 1."""
    kept = torch.ones_like(targets, dtype=torch.bool)
    if ignore_index is not None:
        kept = targets != ignore_index
    log_probabilities, targets = log_probabilities[kept], targets[kept]
    nll = -log_probabilities.gather(1, targets.unsqueeze(1)).sum()
    smooth = -log_probabilities.sum()
    eps_i = label_smoothing / (log_probabilities.size(1) - 1)
    return (1 - label_smoothing - eps_i) * nll + eps_i * smooth, nll
