import pytest
import torch
import torch.nn.functional as F

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.products import row_norms
from spectral_fairseq.functional.softmax_loss import (
    adversarial_logits,
    adversarial_margin,
    unperturbed_nll,
)
from tests.reference import adversarial as reference

PAD = 1


def problem(tokens=11, n=13, d=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(tokens, d, generator=generator, dtype=torch.float64).to(dtype)
    table = torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, n, (tokens,), generator=generator)
    targets[3] = PAD
    return features, table, targets


def adversarial(features, table, targets, epsilon):
    margin = adversarial_margin(features, row_norms(table[targets]), targets, epsilon, PAD)
    return adversarial_logits(features @ table.t(), targets, margin)


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 1.5])
def test_logits_and_gradients_equal_those_of_the_worst_perturbation(epsilon):
    features, table, targets = problem()
    features.requires_grad_(), table.requires_grad_()
    fast = adversarial(features, table, targets, epsilon)
    naive = reference.logits(features, table, targets, epsilon, PAD)
    torch.testing.assert_close(fast, naive, rtol=1e-12, atol=1e-13)
    got = torch.autograd.grad(fast.logsumexp(-1).sum(), (features, table))
    expected = torch.autograd.grad(naive.logsumexp(-1).sum(), (features, table))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_no_perturbation_of_that_radius_is_worse():
    features, table, targets = problem()
    epsilon = 0.3
    fast = adversarial(features, table, targets, epsilon).gather(1, targets.unsqueeze(1))
    keep = targets != PAD
    for seed in range(50):
        delta = torch.randn(table[targets].shape, generator=torch.Generator().manual_seed(seed))
        radius = epsilon * table[targets].norm(dim=1, keepdim=True)
        other = ((table[targets] + radius * F.normalize(delta.double(), dim=1)) * features).sum(1)
        assert (fast.squeeze(1) <= other)[keep].all()


def test_padding_and_the_other_logits_stay_and_nothing_is_changed_in_place():
    features, table, targets = problem()
    logits = features @ table.t()
    before = logits.clone()
    margin = adversarial_margin(features, row_norms(table[targets]), targets, 0.3, PAD)
    changed = adversarial_logits(logits, targets, margin)
    assert torch.equal(logits, before)
    assert torch.equal(changed[3], logits[3])
    difference = changed != logits
    assert difference.sum() == len(targets) - 1
    assert difference.gather(1, targets.unsqueeze(1)).sum() == len(targets) - 1


def test_in_place_gives_the_same_logits_and_gradients():
    features, table, targets = problem()
    features.requires_grad_(), table.requires_grad_()
    results = []
    for inplace in (False, True):
        margin = adversarial_margin(features, row_norms(table[targets]), targets, 0.3, PAD)
        logits = features @ table.t()
        changed = adversarial_logits(logits, targets, margin, inplace=inplace)
        assert (changed.data_ptr() == logits.data_ptr()) == inplace
        gradients = torch.autograd.grad(F.cross_entropy(changed, targets), (features, table))
        results.append((changed.detach(), *gradients))
    for copied, written in zip(*results):
        assert torch.equal(copied, written)


def test_batches_of_any_shape():
    features, table, targets = problem(12)
    flat = adversarial(features, table, targets, 0.2)
    shaped = adversarial(features.view(3, 4, 5), table, targets.view(3, 4), 0.2)
    torch.testing.assert_close(shaped.view(12, 13), flat)


def test_gradcheck_with_label_smoothing():
    features, table, targets = problem()
    features.requires_grad_(), table.requires_grad_()

    def loss(features, table):
        logits = adversarial(features, table, targets, 0.1)
        return F.cross_entropy(logits, targets, ignore_index=PAD, label_smoothing=0.1)

    assert torch.autograd.gradcheck(loss, (features, table))


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
    exact = adversarial_margin(features.half().float(), norms, targets, 0.1, PAD)
    margin = adversarial_margin(features.half(), norms, targets, 0.1, PAD)
    assert margin.dtype == torch.float32
    torch.testing.assert_close(margin, exact)
    logits = (features @ table.t()).half()
    assert adversarial_logits(logits, targets, margin).dtype == torch.float16


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("epsilon", [0.02, 3.0, 40.0])
def test_likelihood_for_the_logs_is_that_of_the_plain_softmax(dtype, tolerance, epsilon):
    features, table, targets = problem(dtype=dtype)
    features[5] = 20 * table[targets[5]]  # a target of probability one
    logits = features @ table.t()
    margin = adversarial_margin(features, row_norms(table[targets]), targets, epsilon, PAD)
    changed = adversarial_logits(logits, targets, margin)
    perturbed = F.cross_entropy(changed, targets, reduction="none")
    plain = F.cross_entropy(logits.double(), targets, reduction="none")
    recovered = unperturbed_nll(perturbed, margin).double()
    scale = float(logits.abs().max() + margin.max())
    torch.testing.assert_close(recovered, plain, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("epsilon", [-0.1, float("inf"), float("nan")])
def test_bad_epsilon_is_refused(epsilon):
    features, table, targets = problem()
    with pytest.raises(ConfigurationError, match="`epsilon`"):
        adversarial_margin(features, row_norms(table[targets]), targets, epsilon)


def test_distances_between_words_grow_in_training():
    """The diversity that the paper proves: word vectors move apart from their nearest others."""

    def nearest(epsilon):
        generator = torch.Generator().manual_seed(0)
        table = (torch.randn(40, 8, generator=generator) * 0.3 + 0.5).requires_grad_()
        centres = torch.randn(40, 8, generator=generator)
        optimiser = torch.optim.Adam([table], lr=0.02)
        for _ in range(80):
            targets = torch.randint(0, 40, (64,), generator=generator)
            features = centres[targets] + 0.3 * torch.randn(64, 8, generator=generator)
            margin = adversarial_margin(features, row_norms(table[targets]), targets, epsilon)
            logits = adversarial_logits(features @ table.t(), targets, margin)
            optimiser.zero_grad()
            F.cross_entropy(logits, targets).backward()
            optimiser.step()
        units = F.normalize(table.detach(), dim=1)
        cosines = units @ units.t() - 2 * torch.eye(40)
        return float((1 - cosines.max(dim=1).values).mean())

    assert nearest(0.3) > nearest(0.0)
