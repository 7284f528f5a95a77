import pytest
import torch

from spectral_fairseq.functional import products
from spectral_fairseq.functional.row_blocks import multiply_
from spectral_fairseq.functional.row_norms import row_norms, unit_rows
from tests.functional.losses import LOSSES, gradients, leaves_and_targets


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 4, 3)])
def test_row_norms_of_any_leading_shape(shape):
    rows = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(row_norms(rows), rows.norm(dim=-1))
    assert torch.autograd.gradcheck(row_norms, (rows,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-8, 1e-19, 1e-25, 1e-36])
def test_row_norms_of_rows_whose_squares_vanish(scale, dtype):
    rows = (torch.randn(13, 7).double() * scale).to(dtype)
    rows[4] = 0
    rows.requires_grad_()
    exact = rows.detach().double()
    norms = row_norms(rows)
    bound = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(norms.detach().double(), exact.norm(dim=1), rtol=bound, atol=0)
    norms.sum().backward()
    directions = torch.nn.functional.normalize(exact, eps=0)
    torch.testing.assert_close(rows.grad.double(), directions.nan_to_num(), rtol=0, atol=2 * bound)


def test_unit_rows_keep_zero_rows():
    units = unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    torch.testing.assert_close(units, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_product_with_transposed_views(rows):
    torch.manual_seed(0)
    left, right = torch.randn(rows, 13), torch.randn(5, 13)
    for a, b in ((left, right), (left.t().contiguous().t(), right.t().contiguous().t())):
        found = products.matmul_transposed(a, b)
        torch.testing.assert_close(found, left @ right.t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("default", [torch.float16, torch.float64])
def test_the_products_of_onednn_are_found_under_any_default_type(default):
    """They were looked for in that type, which oneDNN may not have."""
    torch.set_default_dtype(default)
    try:
        found = products._find_onednn_linear()
    finally:
        torch.set_default_dtype(torch.float32)
    assert found is products._ONEDNN_LINEAR


@pytest.mark.parametrize("within", [0, 512])
@pytest.mark.parametrize("tokens", [3, 40])  # fewer than half of the width, and more
def test_product_that_is_added_with_transposed_factors(tokens, within, monkeypatch):
    monkeypatch.setattr(products, "ADDED_WITHIN", within)
    torch.manual_seed(0)
    scores, rows, total = torch.randn(tokens, 30), torch.randn(tokens, 12), torch.randn(30, 12)
    expected = total.double() + 0.5 * (scores.double().t() @ rows.double())
    products.add_matmul_transposed_(total, scores.t(), rows.t(), alpha=0.5)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_large_product_is_added_a_part_at_a_time(monkeypatch):
    left, right = torch.randn(7, 30).bfloat16().t(), torch.randn(12, 7).bfloat16()
    whole, parts = torch.ones(30, 12), torch.ones(30, 12)
    products.add_matmul_transposed_(whole, left, right)
    monkeypatch.setattr(products, "AT_ONCE", 8 * 12 * 2)
    sizes = []
    plain = products.matmul_transposed
    monkeypatch.setattr(
        products, "matmul_transposed", lambda a, b: sizes.append(len(a)) or plain(a, b)
    )
    products.add_matmul_transposed_(parts, left, right)
    assert sizes == [8, 8, 8, 6]
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("within", [0, 512])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_addend_overwrites_what_lies_there(dtype, alpha, within, monkeypatch):
    monkeypatch.setattr(products, "ADDED_WITHIN", within)
    left, right = torch.randn(30, 8).to(dtype), torch.randn(12, 8).to(dtype)
    total, cleared = torch.full((30, 12), torch.nan), torch.zeros(30, 12)
    products.add_matmul_transposed_(total, left, right, alpha, first=True)
    products.add_matmul_transposed_(cleared, left, right, alpha)
    assert cleared.any()
    torch.testing.assert_close(total, cleared)


def test_a_loss_does_without_the_onednn_operator(monkeypatch):
    leaves, targets = leaves_and_targets()

    def loss_and_gradients():
        loss = LOSSES["softmax"].fast(leaves, targets)[0]
        return [loss, *gradients(loss, leaves)]

    expected = loss_and_gradients()
    monkeypatch.setattr(products, "_ONEDNN_LINEAR", None)
    torch.testing.assert_close(loss_and_gradients(), expected)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 1e-2)])
def test_products_in_place_over_several_blocks(dtype, tolerance, monkeypatch):
    monkeypatch.setattr("spectral_fairseq.functional.row_blocks.BLOCK_ROWS", 50)
    rows, matrix = torch.randn(123, 7), torch.randn(7, 7, dtype=torch.float64)
    product = rows.to(dtype)
    expected = product.double() @ matrix
    multiply_(product, matrix)
    torch.testing.assert_close(product.double(), expected, rtol=tolerance, atol=tolerance)
