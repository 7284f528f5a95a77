"""Coupled Adam as its paper writes it: every row's second moment, and their mean, in float64."""

import torch


def run(weight, gradients, lr, betas, eps, coupled):
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
