"""The losses by blocks, each beside the naive form that defines it, with one signature for all.

The leaves of a loss are contexts h, shape (T, 3, d), scores q of a prior or of clusters, shape
(T, 3), a table w, shape (N, d), and a bias b, shape (N,), or ``None``. Each loss takes of them what
it needs, and returns its scalars in the order of its naive form, the one with a gradient first.
"""

from typing import Any, Callable, NamedTuple

import torch

from spectral_fairseq.functional.adaptive_loss import adaptive_cross_entropy
from spectral_fairseq.functional.adversarial_softmax import adversarial_margin
from spectral_fairseq.functional.consistency_loss import consistency_cross_entropy
from spectral_fairseq.functional.mixture_loss import log_mixture, mixture_cross_entropy
from spectral_fairseq.functional.row_norms import row_norms
from spectral_fairseq.functional.softmax_loss import blockwise_cross_entropy
from tests.reference import losses as reference

PAD, EPSILON, ALPHA = 1, 0.2, 3.0


class Loss(NamedTuple):
    """``fast(leaves, targets, eps, block)``, whose blocks have so many tokens, and its naive form.

    Attributes:
        fast: the loss of the package.
        naive: the same without ``block``.
        bounds: of the relative error of the loss and of its gradients in float32 and bfloat16.
        smooths: whether it takes label smoothing.
    """

    fast: Callable[..., Any]
    naive: Callable[..., Any]
    bounds: Any = ((1e-6, 2e-2), (1e-6, 2e-2))
    smooths: bool = True


def leaves_and_targets(tokens=23, dim=7, words=53, dtype=torch.float32, scale=1.0):
    torch.manual_seed(3)
    h = (scale * torch.randn(tokens, 3, dim).tanh()).to(dtype)
    q = (2 * torch.randn(tokens, 3)).to(dtype)
    w, b = torch.randn(words, dim).to(dtype), torch.randn(words).to(dtype)
    targets = torch.randint(2, words, (tokens,))
    targets[::5] = PAD
    return [leaf.requires_grad_() for leaf in (h, q, w, b)], targets


def in_float64(leaves):
    return [leaf.detach().double().requires_grad_() for leaf in leaves]


def prior(q):
    return q.to(torch.promote_types(q.dtype, torch.float32)).log_softmax(-1)


def _softmax(**options):
    def fast(leaves, targets, eps=0.0, block=None):
        h, _, w, b = leaves
        smoothed = {"label_smoothing": eps, "ignore_index": PAD, **options}
        elements = block and block * len(w)
        found = blockwise_cross_entropy(h[:, 0], targets, w, b, block_elements=elements, **smoothed)
        return found if options.get("z_loss") else found[:3]

    def naive(leaves, targets, eps=0.0):
        h, _, w, b = leaves
        scores = reference.softcapped(h[:, 0] @ w.t() + b, options.get("softcap"))
        if options.get("z_loss"):
            return reference.z_losses(scores, targets, options["z_loss"], None, eps, PAD)
        loss, nll = reference.smoothed_nll(scores.log_softmax(-1), targets, eps, PAD)
        return loss, loss, nll

    return fast, naive


def _mixture(experts=3):
    def fast(leaves, targets, eps=0.0, block=None):
        h, q, w, b = leaves
        smoothed = {"label_smoothing": eps, "ignore_index": PAD}
        elements = block and block * experts * len(w)
        return mixture_cross_entropy(
            *(h[:, :experts], prior(q[:, :experts]), targets, w, b),
            block_elements=elements,
            **smoothed,
        )[:3]

    def naive(leaves, targets, eps=0.0):
        h, q, w, b = leaves
        log_p = reference.log_mixture(h[:, :experts], prior(q[:, :experts]), w, b)
        loss, nll = reference.smoothed_nll(log_p, targets, eps, PAD)
        return loss, loss, nll

    return fast, naive


def adversarial(experts, epsilon=EPSILON):
    """The loss of a mixture, or of one softmax where ``experts`` is None, under the worst noise."""

    def fast(leaves, targets, eps=0.0, block=None):
        h, q, w, b = leaves
        smoothed = {"label_smoothing": eps, "ignore_index": PAD}
        elements = block and block * (experts or 1) * len(w)
        norms = row_norms(w[targets])
        if experts is None:
            margin = adversarial_margin(h[:, 0], norms, epsilon)
            given = {"margin": margin, "block_elements": elements, **smoothed}
            return blockwise_cross_entropy(h[:, 0], targets, w, b, **given)[:3]
        h, log_prior = h[:, :experts], prior(q[:, :experts])
        margin = adversarial_margin(h, norms.unsqueeze(1), epsilon)
        given = {"margin": margin, "block_elements": elements, **smoothed}
        return mixture_cross_entropy(h, log_prior, targets, w, b, **given)[:3]

    def naive(leaves, targets, eps=0.0):
        h, q, w, b = leaves
        h, log_prior = h[:, : experts or 1], prior(q[:, : experts or 1])
        lowered = reference.adversarial_log_mixture(h, log_prior, targets, w, epsilon, b)
        plain = reference.log_mixture(h, log_prior, w, b)
        loss, _ = reference.smoothed_nll(lowered, targets, eps, PAD)
        return (loss, *reference.smoothed_nll(plain, targets, eps, PAD))

    return fast, naive


def _adversarial_with_both(z_loss, softcap):
    def fast(leaves, targets, eps=0.0, block=None):
        h, _, w, b = leaves
        margin = adversarial_margin(h[:, 0], row_norms(w[targets]), EPSILON)
        options = {"z_loss": z_loss, "softcap": softcap, "label_smoothing": eps}
        elements = block and block * len(w)
        given = {"margin": margin, "block_elements": elements, "ignore_index": PAD, **options}
        return blockwise_cross_entropy(h[:, 0], targets, w, b, **given)[:3]

    def naive(leaves, targets, eps=0.0):
        h, _, w, b = leaves
        scores = reference.softcapped(h[:, 0] @ w.t() + b, softcap)
        margin = EPSILON * h[:, 0].norm(dim=1) * w[targets].norm(dim=1)
        lowered = scores - margin.unsqueeze(1) * torch.eye(len(w), dtype=w.dtype)[targets]
        loss = reference.z_losses(lowered, targets, z_loss, None, eps, PAD)[0]
        return (loss, *reference.smoothed_nll(scores.log_softmax(-1), targets, eps, PAD))

    return fast, naive


def _log_mixture(leaves, targets, eps=0.0, block=None):
    h, q, w, b = leaves
    loss, nll = reference.smoothed_nll(log_mixture(h, prior(q), w, b), targets, eps, PAD)
    return loss, loss, nll


def _consistency():
    weight = ALPHA / 2

    def fast(leaves, targets, eps=0.0, block=None):
        h, _, w, b = leaves
        found = consistency_cross_entropy(
            *(h[:, :2], targets, w, b),
            weight=weight,
            label_smoothing=eps,
            ignore_index=PAD,
            block_elements=block and block * 2 * len(w),
        )
        return found.loss, found.likelihood + weight * found.divergence, found.nll

    def naive(leaves, targets, eps=0.0):
        h, _, w, b = leaves
        log_p = torch.log_softmax(h[:, :2] @ w.t() + b, -1).unbind(1)
        loss, nll = reference.r_drop(*log_p, targets, ALPHA, eps, PAD)
        return loss / 2, loss / 2, nll

    return fast, naive


def adaptive(cutoffs):
    def fast(leaves, targets, eps=0.0, block=None):
        h, q, w, b = leaves
        kept = targets.ne(PAD)
        q = q[kept, : len(cutoffs)]
        given = (h[kept, 0], q, targets[kept], w, b, cutoffs)
        return (adaptive_cross_entropy(*given, block_elements=block and block * len(w)),)

    def naive(leaves, targets, eps=0.0):
        h, q, w, b = leaves
        # The scores of the clusters as features of their own, of which words have none.
        wide = torch.cat([h[:, 0], q[:, : len(cutoffs)]], 1)
        words = torch.cat([w, w.new_zeros(len(w), len(cutoffs))], 1)
        clusters = torch.eye(len(cutoffs), dtype=w.dtype)
        clusters = torch.cat([w.new_zeros(len(cutoffs), w.size(1)), clusters], 1)
        log_p = reference.log_adaptive_softmax(wide, words, b, clusters, 0.0, cutoffs)
        return (reference.smoothed_nll(log_p, targets, 0.0, PAD)[0],)

    return fast, naive


CONSISTENT = ((1e-5, 3e-2), (1e-5, 3e-2))
ADAPTIVE = ((1e-6, 2e-2), (3e-6, 6e-2))
SQUARED = ((1e-6, 2e-2), (1e-6, 4e-2))
LOSSES = {
    "softmax": Loss(*_softmax()),
    "softmax with z-loss": Loss(*_softmax(z_loss=0.2), SQUARED),
    "softmax with soft cap": Loss(*_softmax(softcap=1.5), SQUARED),
    "softmax with both": Loss(*_softmax(z_loss=0.2, softcap=1.5), SQUARED),
    "adversarial softmax": Loss(*adversarial(None)),
    "adversarial softmax with both": Loss(*_adversarial_with_both(0.2, 1.5), SQUARED),
    "mixture": Loss(*_mixture()),
    "mixture of one": Loss(*_mixture(1)),
    "adversarial mixture": Loss(*adversarial(3), ((1e-6, 2e-2), (2e-6, 2e-2))),
    "adversarial mixture of one": Loss(*adversarial(1), ((1e-6, 2e-2), (2e-6, 2e-2))),
    "log mixture": Loss(_log_mixture, _mixture()[1]),
    "r-drop": Loss(*_consistency(), CONSISTENT),
    "adaptive of 1": Loss(*adaptive((11,)), ADAPTIVE, smooths=False),
    "adaptive of 2": Loss(*adaptive((1, 52)), ADAPTIVE, smooths=False),
    "adaptive": Loss(*adaptive((5, 6, 40)), ADAPTIVE, smooths=False),
}
SMOOTHED = [
    (name, eps) for name, loss in LOSSES.items() for eps in (0.0, 0.1) if loss.smooths or not eps
]
"""Each loss with the label smoothing that it takes."""


def relative(found, expected):
    expected = expected.detach()
    return float((found.detach().double() - expected).norm() / expected.norm().clamp_min(1e-12))


def gradients(loss, leaves, upstream=1.0):
    """Of all leaves that are trained; zeros of those that the loss does not take."""
    trained = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found = torch.autograd.grad(upstream * loss, trained, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(trained, found)]
