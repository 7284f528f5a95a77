"""Words that are never predicted, whose bias is minus infinity, in losses that work by blocks."""

import math

import pytest
import torch
import torch.nn.functional as F

from spectral_fairseq.functional.adaptive_loss import adaptive_log_probabilities
from spectral_fairseq.functional.adversarial_softmax import adversarial_margin
from spectral_fairseq.functional.consistency_loss import dense_consistency
from spectral_fairseq.functional.mixture_loss import log_mixture
from spectral_fairseq.functional.row_norms import row_norms
from tests.functional.losses import ALPHA, EPSILON, LOSSES, PAD, Loss, adaptive, gradients, prior

VOCABULARY, DIM, CUTOFFS = 13, 4, (4, 9)
# Both sides of every size of a block, whose rows are 1 to 7, 8, 10, .. of at most 8 tokens.
TOKENS = (1, 5, 7, 8, 9, 11, 16, 17, 25)
NAMES = ("softmax", "adversarial softmax", "mixture", "adversarial mixture", "log mixture")
TAKEN = {name: LOSSES[name] for name in (*NAMES, "r-drop")}
TAKEN["adaptive"] = Loss(*adaptive(CUTOFFS))


def smoothed(log_p, targets, eps):
    uniform = eps / (VOCABULARY - 1)
    loss = -(1 - eps - uniform) * log_p.gather(-1, targets.unsqueeze(-1)).sum()
    return loss - uniform * log_p.sum() if eps else loss


def mixed(log_prior, log_p):
    joint = log_prior.unsqueeze(-1) + log_p
    never = torch.isinf(joint).all(1, keepdim=True)
    # torch's logsumexp of minus infinity alone has no gradient.
    return torch.logsumexp(joint.masked_fill(never, 0.0), 1).masked_fill(never[:, 0], -math.inf)


def dense(name, leaves, targets, eps):
    """The loss by operations of torch, which know what a score of minus infinity means."""
    h, q, w, b = leaves
    if name == "adaptive":
        found = adaptive_log_probabilities(h[:, 0], q[:, : len(CUTOFFS)], w, b, CUTOFFS)
        return smoothed(found, targets, 0.0)
    scores = h @ w.t() + b  # [T, 3, N]
    if "adversarial" in name:
        norms, at = row_norms(w[targets]).unsqueeze(1), targets.unsqueeze(1)
        margin = adversarial_margin(h, norms, EPSILON)  # [T, 3]
        scores = scores - margin.unsqueeze(-1) * F.one_hot(at, VOCABULARY)
    log_p = scores.log_softmax(-1)
    if name == "r-drop":
        given = {"weight": ALPHA / 2, "label_smoothing": eps}
        return dense_consistency(log_p[:, :2], targets, **given).loss.sum()
    return smoothed(log_p[:, 0] if "softmax" in name else mixed(prior(q), log_p), targets, eps)


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("never", [(0,), (0, 12), (5,)])
@pytest.mark.parametrize("hit", [False, True])
def test_words_that_are_never_predicted(name, eps, never, hit):
    """The loss and every gradient are torch's, also where a target has no probability at all."""
    if hit and "mixture" in name:
        pytest.skip("no expert is responsible for such a target")
    for tokens in TOKENS:
        generator = torch.Generator().manual_seed(tokens)
        shapes = (tokens, 3, DIM), (tokens, 3), (VOCABULARY, DIM), (VOCABULARY,)
        leaves = [torch.randn(*one, dtype=torch.float64, generator=generator) for one in shapes]
        leaves[3][list(never)] = -math.inf
        possible = torch.tensor([v for v in range(2, VOCABULARY) if v not in never])
        targets = possible[torch.randint(len(possible), (tokens,), generator=generator)]
        if hit:
            targets[0] = never[0]
        targets[3::4] = PAD
        leaves = [one.requires_grad_() for one in leaves]
        kept = targets.ne(PAD)
        expected = dense(name, (leaves[0][kept], leaves[1][kept], *leaves[2:]), targets[kept], eps)
        found = fast(name, leaves, targets, eps)
        torch.testing.assert_close(found, expected)
        assert hit or eps and name != "adaptive" or bool(torch.isfinite(found))
        for mine, theirs in zip(gradients(found, leaves), gradients(expected, leaves)):
            torch.testing.assert_close(mine, theirs)
            assert torch.isfinite(mine).all()


def fast(name, leaves, targets, eps):
    """By blocks of 8 tokens; the distribution of a mixture is smoothed here."""
    if name != "log mixture":
        return TAKEN[name].fast(leaves, targets, eps, 8)[0]
    h, q, w, b = leaves
    kept = targets.ne(PAD)
    return smoothed(log_mixture(h, prior(q), w, b)[kept], targets[kept], eps)
