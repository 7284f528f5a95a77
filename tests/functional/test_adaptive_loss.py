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
from tests.reference import losses as reference

WORDS, DIM = 53, 7
CUTOFFS = [(11,), (5, 6, 40), (1, 52)]


def inputs(cutoffs, tokens=23, dtype=torch.float64):
    torch.manual_seed(3)
    contexts = torch.randn(tokens, DIM, dtype=dtype, requires_grad=True)
    matrix = torch.randn(WORDS, DIM, dtype=dtype, requires_grad=True)
    bias = torch.randn(WORDS, dtype=dtype, requires_grad=True)
    clusters = torch.randn(len(cutoffs), DIM, dtype=dtype, requires_grad=True)
    cluster_bias = torch.randn(len(cutoffs), dtype=dtype, requires_grad=True)
    targets = torch.randint(WORDS, (tokens,))
    return contexts, matrix, bias, clusters, cluster_bias, targets


def scores_of(contexts, clusters, cluster_bias):
    return contexts @ clusters.t() + cluster_bias


@pytest.mark.parametrize("cutoffs", CUTOFFS)
def test_log_probabilities_are_the_naive_ones_in_vocabulary_order(cutoffs):
    contexts, matrix, bias, clusters, cluster_bias, _ = inputs(cutoffs)
    q = scores_of(contexts, clusters, cluster_bias)
    found = adaptive_log_probabilities(contexts, q, matrix, bias, cutoffs)
    expected = reference.log_adaptive_softmax(
        contexts, matrix, bias, clusters, cluster_bias, cutoffs
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(23, dtype=torch.float64))
    three = adaptive_log_probabilities(
        contexts[:20].view(4, 5, DIM), q[:20].view(4, 5, -1), matrix, bias, cutoffs
    )
    assert torch.equal(three.view(20, WORDS), found[:20])


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
