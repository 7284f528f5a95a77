"""Gates and the gated product against the formula written out."""

import pytest
import torch

from spectral_fairseq.functional.gradients import gated_scores, gates_of_counts
from tests.reference import losses as reference

COUNTS = torch.tensor([0, 0, 9, 0, 700, 2, 1, 0, 30, 3, 1])
NEVER_RARE = torch.tensor([0, 1])


def inputs(dtype=torch.float64):
    torch.manual_seed(2)
    contexts = torch.randn(13, 3, dtype=dtype).requires_grad_()
    matrix = torch.randn(11, 3, dtype=dtype).requires_grad_()
    return contexts, matrix, torch.randint(0, 11, (13,))


@pytest.mark.parametrize("counts", [COUNTS, COUNTS * 0])
def test_gates_are_those_of_the_paper(counts):
    found = gates_of_counts(counts, 100, 0.03, NEVER_RARE)
    rare, first, second = reference.gates(counts.tolist(), 100, 0.03, (0, 1))
    assert found.rare.tolist() == rare and any(rare)
    for one, expected in ((found.frequent_target, first), (found.rare_target, second)):
        torch.testing.assert_close(one, torch.tensor(expected))


def test_nothing_is_gated_before_the_first_update():
    gates = gates_of_counts(COUNTS * 0, 0, 0.03, NEVER_RARE)
    assert not gates.rare.any()
    assert gates.frequent_target.eq(1).all() and gates.rare_target.eq(1).all()


def test_gradients_equal_the_sums_written_out():
    contexts, matrix, targets = inputs()
    gates = gates_of_counts(COUNTS, 100, 0.03, NEVER_RARE)
    assert 0 < int(gates.rare[targets].sum()) < len(targets)
    scores = gated_scores(contexts, matrix, targets, gates)
    plain = contexts @ matrix.t()
    torch.testing.assert_close(scores, plain)
    upstream = torch.softmax(plain, -1) - torch.nn.functional.one_hot(targets, 11)
    of_contexts, of_matrix = torch.autograd.grad(scores, (contexts, matrix), upstream.detach())
    torch.testing.assert_close(of_contexts, upstream @ matrix)
    expected = reference.gated_table_gradient(
        contexts.detach(), upstream.detach(), targets, *reference.gates(COUNTS, 100, 0.03, (0, 1))
    )
    torch.testing.assert_close(of_matrix, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_factors_receive_what_the_chain_rule_makes_of_the_gated_gradient(rank):
    contexts, _, targets = inputs()
    factor = torch.randn(11, rank, dtype=torch.float64).requires_grad_()
    basis = torch.randn(3, rank, dtype=torch.float64).requires_grad_()
    gates = gates_of_counts(COUNTS, 100, 0.03, NEVER_RARE)
    scores = gated_scores(contexts, factor, targets, gates, basis)
    dense = factor @ basis.t()
    torch.testing.assert_close(scores, contexts @ dense.t())
    upstream = torch.randn_like(scores)
    found = torch.autograd.grad(scores, (contexts, factor, basis), upstream)
    gated = reference.gated_table_gradient(
        contexts.detach(), upstream, targets, *reference.gates(COUNTS, 100, 0.03, (0, 1))
    )
    expected = torch.autograd.grad(dense, (factor, basis), gated)
    for one, other in zip(found, (upstream @ dense, *expected)):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("factored", [False, True])
def test_without_rare_words_it_is_the_plain_product(factored):
    contexts, matrix, targets = inputs()
    basis = [torch.randn(3, 3, dtype=torch.float64).requires_grad_()] if factored else []
    gates = gates_of_counts(COUNTS, 100, 0.0, NEVER_RARE)
    assert torch.autograd.gradcheck(
        lambda c, m, *b: gated_scores(c, m, targets, gates, *b), (contexts, matrix, *basis)
    )


def test_under_autocast():
    contexts, matrix, targets = inputs(torch.float32)
    gates = gates_of_counts(COUNTS, 100, 0.03, NEVER_RARE)
    exact = torch.autograd.grad(
        gated_scores(contexts, matrix, targets, gates).square().sum(), matrix
    )[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = gated_scores(contexts, matrix, targets, gates)
    assert scores.dtype == torch.bfloat16
    (found,) = torch.autograd.grad(scores.float().square().sum(), matrix)
    assert found.dtype == torch.float32
    assert float((found - exact).norm() / exact.norm()) < 2e-2
