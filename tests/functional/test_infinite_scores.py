"""Words that are never predicted, whose bias is minus infinity, in losses that work by blocks."""

import math

import pytest
import torch
import torch.nn.functional as F

from spectral_fairseq.functional import adaptive_loss, consistency_loss, mixture_loss, softmax_loss

VOCABULARY, DIM, EXPERTS, IGNORED = 13, 4, 2, 1
# Both sides of every size of a block, whose rows are 1 to 7, 8, 10, .. of at most 8 tokens.
TOKENS = (1, 5, 7, 8, 9, 11, 16, 17, 25)


def log_softmax(h, w, b):
    return F.log_softmax(h @ w.t() + b, -1)


def smoothed(log_p, targets, eps):
    uniform = eps / (VOCABULARY - 1)
    loss = -(1 - eps - uniform) * log_p.gather(-1, targets.unsqueeze(-1)).sum()
    return loss - uniform * log_p.sum() if eps else loss


def mixed(h, w, b):
    prior = torch.log_softmax(h[..., 0], -1)
    joint = prior.unsqueeze(-1) + log_softmax(h, w, b)
    never = torch.isinf(joint).all(1, keepdim=True)
    # torch's logsumexp of minus infinity alone has no gradient.
    return torch.logsumexp(joint.masked_fill(never, 0.0), 1).masked_fill(never[:, 0], -math.inf)


def lowered(h, targets, w, b, eps):
    scores = h @ w.t() + b
    return smoothed(F.log_softmax(scores - 0.5 * F.one_hot(targets, VOCABULARY), -1), targets, eps)


def consistent(h, targets, w, b, eps, symmetric):
    parts = consistency_loss.dense_consistency(
        log_softmax(h, w, b), targets, weight=0.7, symmetric=symmetric, label_smoothing=eps
    )
    return parts.loss.sum()


def adaptive_dense(h, targets, w, b, eps):
    found = adaptive_loss.adaptive_log_probabilities(h[:, 0], h[:, 1, :2], w, b, (4, 9))
    return -found.gather(1, targets.unsqueeze(1)).sum()


def block(loss, per_token):
    """The loss in blocks of 8 tokens."""

    def run(h, targets, w, b, eps):
        options = {"label_smoothing": eps, "block_elements": 8 * per_token * VOCABULARY}
        found = loss(h, targets, w, b, ignore_index=IGNORED, **options)
        return found if isinstance(found, torch.Tensor) else found[0]

    return run


def adaptive_blocks(h, targets, w, b, eps):
    kept = targets.ne(IGNORED)
    return adaptive_loss.adaptive_cross_entropy(
        h[kept, 0], h[kept, 1, :2], targets[kept], w, b, (4, 9), block_tokens=8
    )


def prior_of(h):
    return torch.log_softmax(h[..., 0], -1)


def blocks_of(name):
    if name == "softmax":
        return block(lambda h, t, w, b, **o: softmax_loss.blockwise_cross_entropy(
            h[:, 0], t, w, b, **o), 1)  # fmt: skip
    if name == "adversarial":
        return block(lambda h, t, w, b, **o: softmax_loss.blockwise_cross_entropy(
            h[:, 0], t, w, b, margin=h.new_full(t.shape, 0.5), **o), 1)  # fmt: skip
    if name == "mixture":
        return block(lambda h, t, w, b, **o: mixture_loss.mixture_cross_entropy(
            h, prior_of(h), t, w, b, **o), EXPERTS)  # fmt: skip
    if name == "adversarial mixture":
        return block(lambda h, t, w, b, **o: mixture_loss.mixture_cross_entropy(
            h, prior_of(h), t, w, b, margin=h.new_zeros(h.shape[:2]), **o), EXPERTS)  # fmt: skip
    if name == "log mixture":
        return lambda h, t, w, b, eps: smoothed(
            mixture_loss.log_mixture(h, prior_of(h), w, b)[t.ne(IGNORED)], t[t.ne(IGNORED)], eps
        )
    if name == "adaptive":
        return adaptive_blocks
    return block(lambda h, t, w, b, **o: consistency_loss.consistency_cross_entropy(
        h, t, w, b, weight=0.7, symmetric=name == "r-drop", **o), 2)  # fmt: skip


DENSE = {
    "softmax": lambda h, t, w, b, eps: smoothed(log_softmax(h[:, 0], w, b), t, eps),
    "adversarial": lambda h, t, w, b, eps: lowered(h[:, 0], t, w, b, eps),
    "mixture": lambda h, t, w, b, eps: smoothed(mixed(h, w, b), t, eps),
    "adversarial mixture": lambda h, t, w, b, eps: smoothed(mixed(h, w, b), t, eps),
    "log mixture": lambda h, t, w, b, eps: smoothed(mixed(h, w, b), t, eps),
    "adaptive": adaptive_dense,
    "r-drop": lambda h, t, w, b, eps: consistent(h, t, w, b, eps, True),
    "simcut": lambda h, t, w, b, eps: consistent(h, t, w, b, eps, False),
}


def gradients(loss, leaves):
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(one) if each is None else each for one, each in zip(leaves, found)]


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("never", [(0,), (0, 12), (5,)])
@pytest.mark.parametrize("hit", [False, True])
def test_words_that_are_never_predicted(name, eps, never, hit):
    """The loss and every gradient are torch's, also where a target has no probability at all."""
    if hit and "mixture" in name:
        pytest.skip("no expert is responsible for such a target")
    for tokens in TOKENS:
        generator = torch.Generator().manual_seed(tokens)
        h = torch.randn(tokens, EXPERTS, DIM, dtype=torch.float64, generator=generator)
        w = torch.randn(VOCABULARY, DIM, dtype=torch.float64, generator=generator)
        b = torch.randn(VOCABULARY, dtype=torch.float64, generator=generator)
        b[list(never)] = -math.inf
        possible = torch.tensor([v for v in range(2, VOCABULARY) if v not in never])
        targets = possible[torch.randint(len(possible), (tokens,), generator=generator)]
        if hit:
            targets[0] = never[0]
        targets[3::4] = IGNORED
        leaves = [one.requires_grad_() for one in (h, w, b)]
        kept = targets.ne(IGNORED)
        expected = DENSE[name](h[kept], targets[kept], w, b, eps)
        found = blocks_of(name)(h, targets, w, b, eps)
        torch.testing.assert_close(found, expected)
        assert hit or eps and name != "adaptive" or bool(torch.isfinite(found))
        for mine, theirs in zip(gradients(found, leaves), gradients(expected, leaves)):
            torch.testing.assert_close(mine, theirs)
            assert torch.isfinite(mine).all()
