import pytest
import torch

from spectral_fairseq.functional.linalg.gram import accumulate_gram, mirror_gram


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
