"""A table that is divided by its largest singular value."""

import pytest
import torch

from spectral_fairseq.embeddings import SpectralNormEmbedding, entries
from spectral_fairseq.errors import ConfigurationError
from tests.capabilities import HALF_ON_CPU


def largest(matrix):
    return float(torch.linalg.svdvals(matrix.detach().double())[0])


def test_the_largest_singular_value_is_the_scale():
    torch.manual_seed(0)
    assert largest(SpectralNormEmbedding(123, 7, 1).weight) == pytest.approx(1.0, rel=1e-6)
    assert largest(SpectralNormEmbedding(13, 5, 1, scale=3.0).weight) == pytest.approx(3.0)


def test_it_stays_there_in_training():
    torch.manual_seed(0)
    table = SpectralNormEmbedding(31, 5, 1).train()
    goal = torch.randn(31, 5)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.3)
    for _ in range(200):
        optimizer.zero_grad()
        (table.dense() - goal).square().sum().backward()
        optimizer.step()
    assert float(table.stored.detach().norm()) > 1.0
    for _ in range(200):
        table.dense()
    assert largest(table.weight) == pytest.approx(1.0, rel=1e-4)
    assert not table.weight[1].any()


def test_gradient_equals_that_of_the_exact_value():
    torch.manual_seed(0)
    table = SpectralNormEmbedding(13, 5, 1).double()
    for _ in range(50):
        table.dense()
    weight = table.stored.detach().clone().requires_grad_()
    goal = torch.randn(13, 5, dtype=torch.float64)
    (weight / torch.linalg.svdvals(weight)[0] * goal).sum().backward()
    weight.grad[1] = 0
    (table.dense() * goal).sum().backward()
    torch.testing.assert_close(table.stored.grad, weight.grad, rtol=1e-7, atol=1e-9)


def test_evaluation_leaves_the_direction_alone():
    table = SpectralNormEmbedding(13, 5, 1).eval()
    torch.nn.init.normal_(table.stored)
    before = table.direction.clone()
    table(torch.tensor([3])), table.dense()
    assert torch.equal(table.direction, before)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_an_impossible_scale_is_refused(scale):
    with pytest.raises(ConfigurationError, match="`scale`"):
        SpectralNormEmbedding(13, 5, 1, scale=scale)


@HALF_ON_CPU
def test_half_precision_with_squares_beyond_its_range():
    """S'S v is as large as sigma_1 squared: 90,000, where half precision ends at 65,504."""
    table = SpectralNormEmbedding(40, 4, 1).half().train()
    with torch.no_grad():
        table.stored.zero_()
        table.stored[2, 0] = 300.0
    table.direction.copy_(torch.tensor([1.0, 0, 0, 0]))
    found = table(torch.tensor([2]))
    assert table.direction.isfinite().all()
    torch.testing.assert_close(found[0, 0].float(), table.largest.float(), rtol=1e-2, atol=0)


def test_an_average_whose_direction_is_short_has_the_scale():
    """fairseq's average of checkpoints and its EMA made sigma_max 1.44 of c = 1."""
    torch.manual_seed(0)
    table = SpectralNormEmbedding(31, 5, 1).eval()
    table.direction.mul_(0.7)
    assert largest(table.dense()) == pytest.approx(1.0, rel=1e-5)
    rows = SpectralNormEmbedding.dense_rows(table.state_dict(), torch.arange(31), torch.float64)
    assert largest(rows) == pytest.approx(1.0, rel=1e-5)


def test_the_whole_table_is_read_once_however_many_blocks_there_are(monkeypatch):
    """Each block of rows took sigma_max anew, which read the table a hundred times."""
    stored = SpectralNormEmbedding(31, 5, 1).state_dict()
    expected = SpectralNormEmbedding.dense_rows(stored, torch.arange(31), torch.float64)
    shapes = []
    norm = torch.linalg.vector_norm

    def recorded(values, *args, **kwargs):
        shapes.append(values.shape)
        return norm(values, *args, **kwargs)

    monkeypatch.setattr(torch.linalg, "vector_norm", recorded)
    monkeypatch.setattr(entries, "BLOCK_ROWS", 2)
    assert torch.equal(entries.dense_form(SpectralNormEmbedding, stored), expected)
    assert shapes.count((31,)) == 1
