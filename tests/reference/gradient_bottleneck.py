"""The lost share of the logits' gradient, with the projector as a matrix, float64."""

import torch


def lost_gradient(weight, logits, targets):
    weight = weight.double()
    logits = logits.double().clone().requires_grad_()
    torch.nn.functional.cross_entropy(logits, targets, reduction="sum").backward()
    projector = weight @ torch.linalg.pinv(weight)  # [N, N]
    kept = logits.grad @ projector
    return 1 - float(kept.square().sum() / logits.grad.square().sum())
