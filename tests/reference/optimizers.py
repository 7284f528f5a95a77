"""Optimisers in float64: SGD with the average of its iterates, and Coupled Adam."""

import torch

# SGD and the average of all its iterates since a step, kept as a list.


def averaged_sgd(weights, gradients, rates, weight_decay=0.0, start=None):
    """Weights and average after the steps.

    ``gradients[t]`` is a function of the weights; averaging starts after ``start`` steps (never,
    for None), so that the first iterate counted is the result of step ``start + 1``.
    """
    weights, kept = weights.double(), []
    for t, (gradient, rate) in enumerate(zip(gradients, rates)):
        weights = weights - rate * (gradient(weights) + weight_decay * weights)
        if start is not None and t >= start:
            kept.append(weights)
    return weights, sum(kept) / len(kept) if kept else weights


def averaging_fires(history, interval, loss):
    """The reference implementation's condition, on the losses before ``loss``."""
    return len(history) > interval and loss > min(history[: len(history) - interval])


# Coupled Adam as its paper writes it: every row's second moment, and their mean.


def coupled_adam(weight, gradients, lr, betas, eps, coupled):
    """The weights (N, d) after one step for each gradient."""
    w = weight.double().clone()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, gradient in enumerate(gradients, 1):
        g = gradient.double()
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        if coupled:
            v_hat = v_hat.mean(0, keepdim=True).expand_as(w)
        w = w - lr * m_hat / (v_hat.sqrt() + eps)
    return w
