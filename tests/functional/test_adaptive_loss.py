"""The adaptive softmax: the distribution that it factors, and its loss from the clusters hit."""

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional import blocks
from spectral_fairseq.functional.adaptive_loss import (
    adaptive_cross_entropy,
    adaptive_log_probabilities,
    check_cutoffs,
    piece_sizes,
)
from tests.reference import adaptive_softmax as reference

WORDS, DIM = 53, 7
CUTOFFS = [(11,), (5, 6, 40), (1, 52)]


def inputs(cutoffs, tokens=23, dtype=torch.float64, bias=True):
    torch.manual_seed(3)
    contexts = torch.randn(tokens, DIM, dtype=dtype, requires_grad=True)
    matrix = torch.randn(WORDS, DIM, dtype=dtype, requires_grad=True)
    offset = torch.randn(WORDS, dtype=dtype, requires_grad=True) if bias else None
    clusters = torch.randn(len(cutoffs), DIM, dtype=dtype, requires_grad=True)
    cluster_bias = torch.randn(len(cutoffs), dtype=dtype, requires_grad=True)
    targets = torch.randint(WORDS, (tokens,))
    return contexts, matrix, offset, clusters, cluster_bias, targets


def scores_of(contexts, clusters, cluster_bias):
    return contexts @ clusters.t() + cluster_bias


@pytest.mark.parametrize("cutoffs", CUTOFFS)
def test_log_probabilities_are_the_naive_ones_in_vocabulary_order(cutoffs):
    contexts, matrix, bias, clusters, cluster_bias, _ = inputs(cutoffs)
    q = scores_of(contexts, clusters, cluster_bias)
    found = adaptive_log_probabilities(contexts, q, matrix, bias, cutoffs)
    expected = reference.log_probabilities(contexts, matrix, bias, clusters, cluster_bias, cutoffs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(23, dtype=torch.float64))
    three = adaptive_log_probabilities(
        contexts[:20].view(4, 5, DIM), q[:20].view(4, 5, -1), matrix, bias, cutoffs
    )
    assert torch.equal(three.view(20, WORDS), found[:20])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("block", [None, 1, 4])
@pytest.mark.parametrize("cutoffs", CUTOFFS)
def test_loss_and_every_gradient_equal_the_naive_form(cutoffs, block, bias):
    contexts, matrix, offset, clusters, cluster_bias, targets = inputs(cutoffs, bias=bias)
    leaves = [t for t in (contexts, matrix, offset, clusters, cluster_bias) if t is not None]
    q = scores_of(contexts, clusters, cluster_bias)
    loss = adaptive_cross_entropy(contexts, q, targets, matrix, offset, cutoffs, block_tokens=block)
    found = torch.autograd.grad(3 * loss, leaves)
    naive_bias = torch.zeros(WORDS, dtype=torch.float64) if offset is None else offset
    log_p = reference.log_probabilities(
        contexts, matrix, naive_bias, clusters, cluster_bias, cutoffs
    )
    expected = -log_p.gather(1, targets.unsqueeze(1)).sum()
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(found, torch.autograd.grad(3 * expected, leaves)):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_gradcheck():
    contexts, matrix, bias, clusters, cluster_bias, targets = inputs((5, 6, 40), tokens=6)
    targets[:4] = torch.tensor([0, 5, 20, 52])

    def run(h, w, b, c, cb):
        return adaptive_cross_entropy(h, scores_of(h, c, cb), targets, w, b, (5, 6, 40))

    assert torch.autograd.gradcheck(run, (contexts, matrix, bias, clusters, cluster_bias))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_precision(dtype, tolerance):
    cutoffs = (5, 20)
    tensors = [t.detach().to(dtype) for t in inputs(cutoffs)[:5]]
    targets = inputs(cutoffs)[5]
    tensors = [t.requires_grad_() for t in tensors]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    losses = []
    for h, w, b, c, cb in (tensors, exact):
        losses.append(adaptive_cross_entropy(h, scores_of(h, c, cb), targets, w, b, cutoffs))
        losses[-1].backward()
    assert losses[0].dtype == torch.float32
    torch.testing.assert_close(losses[0].double(), losses[1], rtol=tolerance, atol=0)
    for lean, full in zip(tensors, exact):
        assert lean.grad.dtype == dtype
        error = (lean.grad.double() - full.grad).norm() / full.grad.norm()
        assert error < 3 * tolerance


def test_extreme_scores_stay_finite():
    contexts, matrix, bias, clusters, cluster_bias, targets = inputs((5, 20), dtype=torch.float32)
    q = 300 * scores_of(contexts, clusters, cluster_bias)
    loss = adaptive_cross_entropy(300 * contexts, q, targets, matrix, bias, (5, 20))
    expected = adaptive_log_probabilities(300 * contexts, q, matrix, bias, (5, 20))
    torch.testing.assert_close(loss, -expected.gather(1, targets.unsqueeze(1)).sum())
    loss.backward()
    assert torch.isfinite(matrix.grad).all()


def test_only_the_clusters_hit_are_multiplied(monkeypatch):
    products = []
    original = blocks.matmul_transposed

    def counted(left, right):
        products.append((left.size(0), right.size(0)))
        return original(left, right)

    monkeypatch.setattr(blocks, "matmul_transposed", counted)
    contexts, matrix, bias, clusters, cluster_bias, _ = inputs((5, 20), tokens=4)
    with torch.no_grad():
        q = scores_of(contexts, clusters, cluster_bias)
        for targets, expected in (
            ([0, 4, 3, 1], [(4, 5)]),
            ([0, 20, 52, 1], [(4, 5), (2, 33)]),
            ([5, 20, 52, 19], [(4, 5), (2, 15), (2, 33)]),
        ):
            products.clear()
            adaptive_cross_entropy(contexts, q, torch.tensor(targets), matrix, bias, (5, 20))
            assert products == expected


def test_words_of_a_cluster_that_was_not_hit_have_no_gradient():
    contexts, matrix, bias, clusters, cluster_bias, _ = inputs((5, 20), tokens=4)
    q = scores_of(contexts, clusters, cluster_bias)
    targets = torch.tensor([0, 6, 7, 1])
    adaptive_cross_entropy(contexts, q, targets, matrix, bias, (5, 20)).backward()
    assert matrix.grad[20:].eq(0).all() and bias.grad[20:].eq(0).all()
    assert matrix.grad[:20].ne(0).any(1).all()


def test_no_tokens():
    contexts, matrix, bias, clusters, cluster_bias, targets = inputs((5, 20), tokens=0)
    loss = adaptive_cross_entropy(
        contexts, scores_of(contexts, clusters, cluster_bias), targets, matrix, bias, (5, 20)
    )
    loss.backward()
    assert loss.item() == 0 and matrix.grad.eq(0).all()


@pytest.mark.parametrize(
    "cutoffs, message",
    [
        ((), "found none"),
        ((0, 5), "found 0,5"),
        ((7, 5), "7,5"),
        ((5, 5), "5,5"),
        ((5, WORDS), f"below {WORDS}"),
    ],
)
def test_bad_cutoffs_are_refused(cutoffs, message):
    with pytest.raises(ConfigurationError, match=message):
        check_cutoffs(cutoffs, WORDS)


def test_good_cutoffs_cut_the_vocabulary():
    assert check_cutoffs([20000, 40000, 200000], 267735) == (20000, 40000, 200000)
    assert piece_sizes((20000, 40000, 200000), 267735) == [20000, 20000, 160000, 67735]


def test_cluster_scores_of_another_shape_are_refused():
    contexts, matrix, bias, clusters, cluster_bias, targets = inputs((5, 20))
    q = scores_of(contexts, clusters, cluster_bias)
    with pytest.raises(ConfigurationError, match="`cluster_scores` of shape"):
        adaptive_cross_entropy(contexts, q, targets, matrix, bias, (5,))
