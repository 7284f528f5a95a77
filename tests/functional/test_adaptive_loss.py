"""The loss of the adaptive softmax, from the clusters that are hit, and its cutoffs."""

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

WORDS, DIM, CUTOFFS = 53, 7, (5, 20)


def inputs(tokens=23, dtype=torch.float64):
    """Contexts, scores of the clusters, a table, a bias, and targets."""
    torch.manual_seed(3)
    contexts = torch.randn(tokens, DIM, dtype=dtype, requires_grad=True)
    q = 3 * torch.randn(tokens, len(CUTOFFS), dtype=dtype)
    matrix = torch.randn(WORDS, DIM, dtype=dtype, requires_grad=True)
    bias = torch.randn(WORDS, dtype=dtype, requires_grad=True)
    return contexts, q, matrix, bias, torch.randint(WORDS, (tokens,))


def test_extreme_scores_stay_finite():
    contexts, q, matrix, bias, targets = inputs(dtype=torch.float32)
    loss = adaptive_cross_entropy(300 * contexts, 300 * q, targets, matrix, bias, CUTOFFS)
    expected = adaptive_log_probabilities(300 * contexts, 300 * q, matrix, bias, CUTOFFS)
    torch.testing.assert_close(loss, -expected.gather(1, targets.unsqueeze(1)).sum())
    loss.backward()
    assert torch.isfinite(matrix.grad).all()


def test_log_probabilities_of_half_precision_are_normalised_in_float32():
    contexts, q, matrix, bias, _ = inputs(dtype=torch.bfloat16)
    found = adaptive_log_probabilities(contexts, q, matrix, bias, CUTOFFS)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(23))


def test_only_the_clusters_hit_are_multiplied(monkeypatch):
    products = []
    original = blocks.matmul_transposed

    def counted(left, right):
        products.append((left.size(0), right.size(0)))
        return original(left, right)

    monkeypatch.setattr(blocks, "matmul_transposed", counted)
    contexts, q, matrix, bias, _ = inputs(tokens=4)
    with torch.no_grad():
        for targets, expected in (
            ([0, 4, 3, 1], [(4, 5)]),
            ([0, 20, 52, 1], [(4, 5), (2, 33)]),
            ([5, 20, 52, 19], [(4, 5), (2, 15), (2, 33)]),
        ):
            products.clear()
            adaptive_cross_entropy(contexts, q, torch.tensor(targets), matrix, bias, CUTOFFS)
            assert products == expected


def test_words_of_a_cluster_that_was_not_hit_have_no_gradient():
    contexts, q, matrix, bias, _ = inputs(tokens=4)
    targets = torch.tensor([0, 6, 7, 1])
    adaptive_cross_entropy(contexts, q, targets, matrix, bias, CUTOFFS).backward()
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
        ((1.9, 5), "whole numbers.*found 1.9,5"),
    ],
)
def test_bad_cutoffs_are_refused(cutoffs, message):
    with pytest.raises(ConfigurationError, match=message):
        check_cutoffs(cutoffs, WORDS)


def test_good_cutoffs_cut_the_vocabulary():
    assert check_cutoffs([20000, 40000, 200000], 267735) == (20000, 40000, 200000)
    assert piece_sizes((20000, 40000, 200000), 267735) == [20000, 20000, 160000, 67735]
