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


def adversarial_log_mixture(contexts, log_prior, targets, matrix, epsilon, bias=None):
    """The log-mixture (T, N) with each expert's target score at its minimum over the worst delta.

    The delta of length eps ||w_y|| is built for every token and expert and added to w_y.
    """
    scores = torch.nn.functional.linear(contexts, matrix, bias)  # [T, K, N]
    rows = []
    for token, y in enumerate(targets.tolist()):
        experts = []
        for h, expert in zip(contexts[token], scores[token]):
            delta = -epsilon * matrix[y].norm() * h / h.norm()
            experts.append(expert.index_add(0, torch.tensor([y]), (delta @ h).unsqueeze(0)))
        rows.append(torch.stack(experts))
    joint = torch.log_softmax(torch.stack(rows), -1) + log_prior.unsqueeze(-1)
    return torch.logsumexp(joint, 1)
