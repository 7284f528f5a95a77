"""The margin of the adversarial softmax, and known values of the z-loss and of the soft cap."""

import math

import pytest
import torch
import torch.nn.functional as F

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.adversarial_softmax import (
    adversarial_margin,
    lower_targets_,
    unperturbed_nll,
)
from spectral_fairseq.functional.row_norms import row_norms
from spectral_fairseq.functional.softmax_loss import blockwise_cross_entropy
from tests.functional.losses import PAD, leaves_and_targets
from tests.reference import losses as reference


def problem(tokens=11, n=13, d=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(tokens, d, generator=generator, dtype=torch.float64).to(dtype)
    table = torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, n, (tokens,), generator=generator)
    targets[3] = PAD
    return features, table, targets


def adversarial(features, table, targets, epsilon):
    margin = adversarial_margin(features, row_norms(table[targets]), epsilon)
    return lower_targets_(features @ table.t(), targets, margin)


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 1.5])
def test_logits_and_gradients_equal_those_of_the_worst_perturbation(epsilon):
    features, table, targets = problem()
    features.requires_grad_(), table.requires_grad_()
    fast = adversarial(features, table, targets, epsilon)
    naive = reference.adversarial_logits(features, table, targets, epsilon)
    torch.testing.assert_close(fast, naive, rtol=1e-12, atol=1e-13)
    got = torch.autograd.grad(fast.logsumexp(-1).sum(), (features, table))
    expected = torch.autograd.grad(naive.logsumexp(-1).sum(), (features, table))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_batches_of_any_shape():
    features, table, targets = problem(12)
    flat = adversarial(features, table, targets, 0.2)
    shaped = adversarial(features.view(3, 4, 5), table, targets.view(3, 4), 0.2)
    torch.testing.assert_close(shaped.view(12, 13), flat)


def test_zero_features_and_zero_vectors_are_finite():
    features, table, targets = problem(dtype=torch.float32)
    features[0] = 0
    table[targets[2]] = 0
    features.requires_grad_(), table.requires_grad_()
    F.cross_entropy(adversarial(features, table, targets, 0.5), targets).backward()
    assert torch.isfinite(features.grad).all() and torch.isfinite(table.grad).all()


def test_half_precision_features_give_a_float32_margin():
    features, table, targets = problem(dtype=torch.float32)
    norms = row_norms(table[targets])
    exact = adversarial_margin(features.half().float(), norms, 0.1)
    margin = adversarial_margin(features.half(), norms, 0.1)
    assert margin.dtype == torch.float32
    torch.testing.assert_close(margin, exact)
    logits = (features @ table.t()).half()
    assert lower_targets_(logits, targets, margin).dtype == torch.float16


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("epsilon", [0.02, 3.0, 40.0])
def test_likelihood_for_the_logs_is_that_of_the_plain_softmax(dtype, tolerance, epsilon):
    features, table, targets = problem(dtype=dtype)
    features[5] = 20 * table[targets[5]]  # a target of probability one
    logits = features @ table.t()
    margin = adversarial_margin(features, row_norms(table[targets]), epsilon)
    changed = lower_targets_(logits.clone(), targets, margin)
    perturbed = F.cross_entropy(changed, targets, reduction="none")
    plain = F.cross_entropy(logits.double(), targets, reduction="none")
    recovered = unperturbed_nll(perturbed, margin).double()
    scale = float(logits.abs().max() + margin.max())
    torch.testing.assert_close(recovered, plain, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("epsilon", [-0.1, float("inf"), float("nan")])
def test_bad_epsilon_is_refused(epsilon):
    features, table, targets = problem()
    with pytest.raises(ConfigurationError, match="`epsilon`"):
        adversarial_margin(features, row_norms(table[targets]), epsilon)


def test_values_known_from_outside():
    """Scores are given as rows of the contexts beside a table that is the identity."""
    scores = torch.tensor([[2.0, 0, -1, 0.5], [0, 0, 0, 0]], dtype=torch.double).requires_grad_()
    table = torch.eye(4, dtype=torch.double)
    loss = blockwise_cross_entropy(scores, torch.tensor([0, 3]), table, z_loss=1e-4).loss / 2
    loss.backward()
    assert loss.item() == pytest.approx(0.8646923924359461, rel=1e-14)
    first = [-0.14478370833, 0.04807329744, 0.01768517780, 0.07925946805]
    assert scores.grad[0].tolist() == pytest.approx(first, rel=1e-9)

    scores = torch.tensor([[40.0, -20, 10]], dtype=torch.double).requires_grad_()
    table = torch.eye(3, dtype=torch.double)
    loss = blockwise_cross_entropy(scores, torch.tensor([2]), table, softcap=30.0).loss
    loss.backward()
    assert loss.item() == pytest.approx(16.4564677976, rel=1e-10)
    assert scores.grad[0].tolist() == pytest.approx(
        [0.24299268744, 7.7788e-20, -0.89662949568], rel=1e-4
    )


def test_without_margin_and_z_loss_the_plain_loss_is_the_loss():
    (h, _, w, b), targets = leaves_and_targets()
    found = blockwise_cross_entropy(h[:, 0], targets, w, b, label_smoothing=0.1)
    assert torch.equal(found.plain_loss, found.loss) and not found.squares


def test_scores_far_beyond_the_cap_are_finite():
    (h, _, w, b), targets = leaves_and_targets(scale=1e4)
    found = blockwise_cross_entropy(h[:, 0], targets, w, b, z_loss=1e-4, softcap=30.0)
    found.loss.backward()
    assert all(one.isfinite() for one in found)
    assert all(leaf.grad.isfinite().all() for leaf in (h, w, b))
    assert float(found.nll) <= len(targets) * (60 + math.log(len(w)))
