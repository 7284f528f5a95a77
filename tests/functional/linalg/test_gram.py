import pytest
import torch

from spectral_fairseq.functional.spectra import accumulate_gram, gram, mirror_gram


@pytest.mark.parametrize("dim", [1, 7, 64, 65, 130, 700])
def test_the_whole_product(dim):
    torch.manual_seed(0)
    matrix = torch.randn(37, dim, dtype=torch.float64)
    gram = torch.zeros(dim, dim, dtype=torch.float64)
    for block in matrix.split(11):
        accumulate_gram(gram, block)
    assert mirror_gram(gram) is gram
    torch.testing.assert_close(gram, matrix.t() @ matrix, rtol=1e-11, atol=1e-11)
    assert torch.equal(gram, gram.t())
    # Mirroring again changes nothing, so more blocks may follow.
    assert torch.equal(mirror_gram(gram.clone()), gram)
    accumulate_gram(gram, matrix)
    torch.testing.assert_close(mirror_gram(gram), 2 * matrix.t() @ matrix, rtol=1e-11, atol=1e-11)


def test_excluded_rows_get_no_gradient_at_all():
    """Adam would make whole steps of what is left by rounding."""
    torch.manual_seed(0)
    matrix = torch.randn(50, 8, dtype=torch.float64, requires_grad=True)
    excluded = torch.tensor([0, 7])
    gram(matrix, excluded).cumsum(0).square().sum().backward()
    kept = torch.ones(50, dtype=torch.bool)
    kept[excluded] = False
    rows = matrix.detach()[kept].requires_grad_()
    (rows.t() @ rows).cumsum(0).square().sum().backward()
    assert not matrix.grad[excluded].any()
    torch.testing.assert_close(matrix.grad[kept], rows.grad)
