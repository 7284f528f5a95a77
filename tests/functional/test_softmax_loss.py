"""The blockwise cross entropy of one softmax, and the matrix product under it."""

import pytest
import torch
import torch.nn.functional as F

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional import products
from spectral_fairseq.functional.blocks import softmax_
from spectral_fairseq.functional.products import row_norms
from spectral_fairseq.functional.softmax_loss import (
    adversarial_logits,
    adversarial_margin,
    blockwise_cross_entropy,
    unperturbed_nll,
)
from tests.capabilities import FLOAT16, HALF_ON_CPU
from tests.reference import adversarial as adversarial_reference
from tests.reference import mixture as reference

PAD = 1


def inputs(tokens=23, dim=7, words=53, dtype=torch.float32, scale=1.0):
    torch.manual_seed(3)
    contexts = (scale * torch.randn(tokens, dim)).to(dtype).requires_grad_()
    matrix = torch.randn(words, dim).to(dtype).requires_grad_()
    bias = torch.randn(words).to(dtype).requires_grad_()
    targets = torch.randint(2, words, (tokens,))
    targets[::5] = PAD
    return contexts, targets, matrix, bias


def naive(contexts, targets, matrix, bias, smoothing):
    leaves = [t.detach().double().requires_grad_() for t in (contexts, matrix, bias)]
    log_p = torch.log_softmax(leaves[0] @ leaves[1].t() + leaves[2], -1)
    loss, nll = reference.smoothed_nll(log_p, targets, smoothing, PAD)
    loss.backward()
    return loss, nll, [leaf.grad for leaf in leaves]


def relative(found, expected):
    expected = expected.detach()
    return float((found.detach().double() - expected).norm() / expected.norm().clamp_min(1e-12))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("tokens,block", [(23, None), (23, 53 * 4), (1, None), (24, 1)])
def test_equals_the_naive_form_in_float64(smoothing, tokens, block):
    contexts, targets, matrix, bias = inputs(tokens + 1)
    loss, _, nll, _ = blockwise_cross_entropy(
        contexts,
        targets,
        matrix,
        bias,
        label_smoothing=smoothing,
        ignore_index=PAD,
        block_elements=block,
    )
    (3 * loss).backward()
    expected_loss, expected_nll, gradients = naive(contexts, targets, matrix, bias, smoothing)
    assert relative(loss, expected_loss) < 1e-6
    assert relative(nll, expected_nll) < 1e-6
    for leaf, gradient in zip((contexts, matrix, bias), gradients):
        assert relative(leaf.grad, 3 * gradient) < 1e-6
    assert contexts.grad[0].eq(0).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradcheck(smoothing):
    contexts, targets, matrix, bias = inputs(5, 3, 11, torch.float64)

    def loss(*leaves):
        return blockwise_cross_entropy(
            leaves[0],
            targets,
            *leaves[1:],
            label_smoothing=smoothing,
            ignore_index=PAD,
            block_elements=22,
        )[0]

    assert torch.autograd.gradcheck(loss, (contexts, matrix, bias))


def test_only_ignored_targets_give_zero_and_zero_gradients():
    contexts, targets, matrix, bias = inputs()
    targets.fill_(PAD)
    loss, _, nll, _ = blockwise_cross_entropy(
        contexts, targets, matrix, bias, label_smoothing=0.1, ignore_index=PAD
    )
    loss.backward()
    assert loss.item() == nll.item() == 0
    for leaf in (contexts, matrix, bias):
        assert leaf.grad.eq(0).all()


def test_frozen_inputs_get_no_gradient():
    contexts, targets, matrix, bias = inputs()
    loss, *_ = blockwise_cross_entropy(
        contexts, targets, matrix.detach(), None, label_smoothing=0.1, ignore_index=PAD
    )
    loss.backward()
    _, _, gradients = naive(contexts, targets, matrix, torch.zeros(53), 0.1)
    assert relative(contexts.grad, gradients[0]) < 1e-6
    with torch.no_grad():
        same, *_ = blockwise_cross_entropy(
            contexts, targets, matrix, None, label_smoothing=0.1, ignore_index=PAD
        )
    assert same == loss


@pytest.mark.parametrize(
    "dtype,limit", [(torch.bfloat16, 2e-2), pytest.param(torch.float16, 2e-3, marks=HALF_ON_CPU)]
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_half_precision_stays_near_float64(dtype, limit, smoothing):
    contexts, targets, matrix, bias = inputs(dtype=dtype)
    loss, *_ = blockwise_cross_entropy(
        contexts, targets, matrix, bias, label_smoothing=smoothing, ignore_index=PAD
    )
    loss.backward()
    expected, _, gradients = naive(contexts, targets, matrix, bias, smoothing)
    assert loss.dtype == torch.float32
    assert relative(loss, expected) < limit
    for leaf, gradient in zip((contexts, matrix, bias), gradients):
        assert leaf.grad.dtype == dtype
        assert relative(leaf.grad, gradient) < limit


@HALF_ON_CPU
def test_float16_gradients_below_its_range_survive_loss_scaling():
    contexts, targets, matrix, bias = inputs(1, 4, 3, torch.float16)
    targets = targets.new_tensor([2])
    with torch.no_grad():
        matrix.copy_(torch.eye(4)[:3])
        bias.zero_()
        contexts.copy_(torch.tensor([[0.0, 0.0, 18.5, 0.0]]))
    loss, *_ = blockwise_cross_entropy(contexts, targets, matrix, bias)
    (loss * 2.0**14).backward()
    expected = 2.0**14 * torch.exp(torch.tensor(-18.5))
    assert bias.grad[0] == pytest.approx(expected.item(), rel=2e-3)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FLOAT16])
def test_scores_of_ten_thousand_are_finite(dtype, smoothing):
    contexts, targets, matrix, bias = inputs(dtype=dtype, scale=1e3)
    loss, _, nll, _ = blockwise_cross_entropy(
        contexts, targets, matrix, bias, label_smoothing=smoothing, ignore_index=PAD
    )
    loss.backward()
    scores = contexts.detach().double() @ matrix.detach().double().t()
    assert scores.abs().max() > 7e3
    expected, _, _ = naive(contexts, targets, matrix, bias, smoothing)
    assert relative(loss, expected) < 1e-2
    assert all(leaf.grad.isfinite().all() for leaf in (contexts, matrix, bias))


def test_softmax_overwrites_the_scores():
    scores = torch.randn(5, 4097) * 30
    probabilities, log_z = torch.softmax(scores, -1), torch.logsumexp(scores, -1)
    torch.testing.assert_close(softmax_(scores), log_z)
    torch.testing.assert_close(scores, probabilities)


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_product_with_transposed_views(rows):
    torch.manual_seed(0)
    left, right = torch.randn(rows, 13), torch.randn(5, 13)
    for a, b in ((left, right), (left.t().contiguous().t(), right.t().contiguous().t())):
        found = products.matmul_transposed(a, b)
        torch.testing.assert_close(found, left @ right.t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("within", [0, 512])
@pytest.mark.parametrize("tokens", [3, 40])  # fewer than half of the width, and more
def test_product_that_is_added_with_transposed_factors(tokens, within, monkeypatch):
    monkeypatch.setattr(products, "ADDED_WITHIN", within)
    torch.manual_seed(0)
    scores, rows, total = torch.randn(tokens, 30), torch.randn(tokens, 12), torch.randn(30, 12)
    expected = total.double() + 0.5 * (scores.double().t() @ rows.double())
    products.add_matmul_transposed_(total, scores.t(), rows.t(), alpha=0.5)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_loss_does_without_the_onednn_operator(monkeypatch):
    contexts, targets, matrix, bias = inputs()
    monkeypatch.setattr(products, "_ONEDNN_LINEAR", None)
    loss, *_ = blockwise_cross_entropy(contexts, targets, matrix, bias, ignore_index=PAD)
    loss.backward()
    expected, _, gradients = naive(contexts, targets, matrix, bias, 0.0)
    assert relative(loss, expected) < 1e-6
    assert relative(matrix.grad, gradients[1]) < 1e-6


def test_sizes_and_smoothing_are_checked():
    contexts, targets, matrix, bias = inputs()
    with pytest.raises(ConfigurationError, match=r"`contexts` of shape \(\d+, 7\)"):
        blockwise_cross_entropy(contexts[:, :5], targets, matrix)
    with pytest.raises(ConfigurationError, match="`targets` of shape"):
        blockwise_cross_entropy(contexts, targets[1:], matrix)
    with pytest.raises(ConfigurationError, match="bias"):
        blockwise_cross_entropy(contexts, targets, matrix, bias[1:])
    for smoothing in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigurationError, match="`label_smoothing`"):
            blockwise_cross_entropy(contexts, targets, matrix, label_smoothing=smoothing)
    with pytest.raises(ConfigurationError, match="two words"):
        blockwise_cross_entropy(contexts, targets, matrix[:1], label_smoothing=0.1)


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
    naive = adversarial_reference.logits(features, table, targets, epsilon, PAD)
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
