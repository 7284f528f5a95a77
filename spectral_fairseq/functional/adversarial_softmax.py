"""The adversarial softmax: each target word is scored with the worst vector near its own.

Wang, Gong, Liu: "Improving Neural Language Modeling via Adversarial Training", ICML 2019,
https://proceedings.mlr.press/v97/wang19f.html. The inner problem has a closed form,

    min over ||delta|| <= eps ||w_y|| of (w_y + delta)'h  =  w_y'h - eps ||w_y|| ||h||

so the target's logit loses a margin eps ||w_y|| ||h||, in training only; the other logits keep
their values. In a mixture of softmaxes each expert has a target's logit w_y'h_k of its own, which
loses eps ||w_y|| ||h_k||.

Flags: ``--adversarial-epsilon`` 0.
In order: ``plugin/likelihood_choice.py: form_for``, ``adversarial_margin``, ``unperturbed_loss``.

Note [Gradient of the margin]
-----------------------------
The margin is differentiated as a function of both h and w_y: the objective is the minimum itself,
whose radius eps ||w_y|| depends on w_y. The gradient for h is -eps ||w_y|| h/||h||, the same as
with a constant worst delta. For w_y the authors' public implementation differs in two ways: it
holds the radius constant, which leaves out -eps ||h|| w_y/||w_y||, and it perturbs only targets
whose cosine with h is positive. Detach ``target_norms`` to hold the radius constant.
"""

from __future__ import annotations

from typing import Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import check_range
from spectral_fairseq.functional.precision import widened
from spectral_fairseq.functional.row_norms import row_norms


def adversarial_margin(features: Tensor, target_norms: Tensor, epsilon: float) -> Tensor:
    """Return the margin eps ||w_y|| ||h||.

    Args:
        features: h, shape (*, d), the input of the output product.
        target_norms: ||w_y|| of each target's vector, shape (*): the norms of the gathered rows,
            so that the cost does not depend on the size of the table. For the contexts of a
            mixture, features of shape (*, K, d), the shape is (*, 1).
        epsilon: radius of the perturbation as a share of ||w_y||, at least 0.

    Returns:
        Shape (*), float32 or wider.

    Raises:
        ConfigurationError: epsilon is negative, infinite or not a number.
    """
    check_range("`epsilon`", epsilon, at_least=0)
    features = widened(features)
    return epsilon * target_norms.to(features.dtype) * row_norms(features)


def lower_targets_(scores: Tensor, targets: Tensor, margin: Tensor) -> Tensor:
    """Lower the scores of the targets by ``margin`` in place, and return the scores.

    Any loss of these scores, also with label smoothing, is that of the perturbed output layer.

    Args:
        scores: shape (*, N).
        targets: shape (*), each from 0 to N - 1, also those that are padding.
        margin: from :func:`adversarial_margin`, shape (*).
    """
    return scores.scatter_add_(-1, targets.unsqueeze(-1), -margin.unsqueeze(-1).to(scores.dtype))


@torch.no_grad()
def unperturbed_nll(nll: Tensor, margin: Tensor) -> Tensor:
    """Return the negative log-likelihood without the margin, for logs, at a cost independent of N.

    Raising one logit by m changes the normaliser by the factor 1 - p + p e^m, where p = e^-nll
    is the target's probability.

    Args:
        nll: -log p of the targets under :func:`lower_targets_`, shape (*).
        margin: m, shape (*).

    Returns:
        -log p of the targets under the unperturbed logits, shape (*), without a gradient.
    """
    others = torch.log1p(-torch.exp(-nll))  # log(1 - p), -inf where p is 1
    return torch.logaddexp(others, margin - nll) + nll - margin


@torch.no_grad()
def unperturbed_loss(
    loss: Tensor, nll: Tensor, margin: Tensor, smoothing: Tuple[float, float], vocabulary: int
) -> Tuple[Tensor, Tensor]:
    """Return the label-smoothed loss and the NLL without the margin, as :func:`unperturbed_nll`.

    With the target's logit raised again by its margin m every log-probability falls by
    c = nll_plain - nll + m, and the target's rises by m.

    Args:
        loss: label-smoothed loss of the targets under :func:`lower_targets_`, shape (*).
        nll: -log p of the targets under the same logits, shape (*).
        margin: m, shape (*).
        smoothing: weights of the target's -log p and of every word's, from
            :func:`~.blocks.smoothing_weights`.
        vocabulary: N.

    Returns:
        Two tensors of shape (*), without a gradient.
    """
    target_weight, uniform = smoothing
    plain = unperturbed_nll(nll, margin)
    fall = plain - nll + margin
    change = target_weight * (plain - nll) + uniform * (vocabulary * fall - margin)
    # The loss of a target that has no probability is infinite, with and without the margin.
    return loss + change.masked_fill(nll.isinf(), 0.0), plain
