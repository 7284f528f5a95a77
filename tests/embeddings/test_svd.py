import math

import pytest
import torch

from spectral_fairseq.embeddings.svd import SVDEmbedding
from spectral_fairseq.errors import CheckpointError, ConfigurationError
from spectral_fairseq.functional.orthogonality_penalty import orthogonality_penalty

PAD, FILLERS = 1, (35, 36)


def table(n=37, d=5, **options):
    torch.manual_seed(0)
    return SVDEmbedding(n, d, PAD, FILLERS, **options)


def counted(weight):
    keep = [i for i in range(weight.size(0)) if i not in (PAD, *FILLERS)]
    return weight[keep]


def dense(n=37, d=5, seed=1, dtype=torch.float64):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("prior, c2, gamma", [("exponential", 0.1, 1.0), ("polynomial", 0, 0.5)])
def test_starts_with_the_priors_spectrum_and_the_usual_norm(prior, c2, gamma):
    module = table(prior=prior, c2=c2, gamma=gamma)
    values = torch.linalg.svdvals(counted(module.weight).double())
    torch.testing.assert_close(values, module.prior().double(), rtol=1e-5, atol=1e-6)
    # N(0, 1/d) entries give rows of norm about 1: a squared Frobenius norm of N words.
    assert abs(float(module.weight.detach().square().sum()) - 34) < 1e-3
    assert module.weight[PAD].abs().sum() == 0


def test_stored_factors_have_the_scale_of_a_plain_table():
    module = table(n=1003, d=16)
    plain = torch.nn.Embedding(1003, 16)
    torch.nn.init.normal_(plain.weight, std=16**-0.5)
    ratio = float(counted(module.U).std() / plain.weight.std())
    assert 0.9 < ratio < 1.1
    torch.testing.assert_close(module.sigma.square().mean(), torch.tensor(1.0))


@pytest.mark.parametrize("n, d", [(37, 5), (130, 123)])
def test_the_factors_of_a_dense_table_are_orthonormal(n, d):
    weight = dense(n, d, dtype=torch.float32)
    module = SVDEmbedding.from_dense(weight, PAD, excluded_rows=(n - 1,))
    u_gram, v_gram = module.grams()
    assert float(orthogonality_penalty(u_gram, v_gram, (1, 1, 1, 1))) < 1e-6
    torch.testing.assert_close(module.sigma.square().mean(), torch.tensor(1.0))
    # An automatic c1 now means the norm of the table that was given.
    keep = [i for i in range(n) if i not in (PAD, n - 1)]
    torch.testing.assert_close(module.prior().norm(), weight[keep].norm())


@pytest.mark.parametrize("padding", [0.0, 3.0])  # within the span of the other rows, or outside
def test_from_a_rank_deficient_table(padding):
    weight = dense()
    weight[:, 4] = 0
    weight[PAD] *= padding
    weight[PAD, 4] = padding
    module = SVDEmbedding.from_dense(weight.float(), PAD, excluded_rows=FILLERS)
    assert padding or not module.U[PAD].any()
    torch.testing.assert_close(module.weight, weight.float(), rtol=1e-5, atol=2e-6)


def test_fewer_words_than_dimensions_is_refused():
    with pytest.raises(ConfigurationError, match="N = 34 .* d = 35"):
        SVDEmbedding(37, 35, PAD, FILLERS)


def test_half_precision_keeps_the_scales_and_comes_back():
    module = table()
    before = module.weight.clone()
    scale, norm, prior = module.scale.clone(), module.initial_norm.clone(), module.prior()
    module.half()
    assert module.U.dtype == torch.float16 and module.scale.dtype == torch.float32
    module.float()
    assert torch.equal(module.scale, scale) and torch.equal(module.initial_norm, norm)
    assert torch.equal(module.prior(), prior)
    torch.testing.assert_close(module.weight, before, rtol=1e-2, atol=1e-3)


def test_factors_too_large_for_float32_can_be_measured():
    entries = SVDEmbedding(40, 16, 1).state_dict()
    entries["U"] = entries["U"].clone().index_fill_(0, torch.tensor(3), 2e37)
    found = SVDEmbedding.measure_factors(entries, torch.tensor([1])).orthogonality
    assert all(math.isfinite(value) for value in found.values())
    assert found["u_spectral"] > 1e70 and found["v_spectral"] < 1e-6


def test_gradients_of_what_penalties_read():
    """Of the Gram matrices and of sigma, against those of their definitions."""
    module = table()
    u, v = counted(module.U) / module.scale, module.V / module.v_scale
    definitions = (u.t() @ u, v.t() @ v, module.sigma * module.scale)
    gradients = []
    for read in ((*module.grams(), module.singular_values()), definitions):
        value = sum(one.square().sum() for one in read)
        gradients.append(torch.autograd.grad(value, (module.U, module.sigma, module.V)))
    torch.testing.assert_close(*gradients)


def test_a_table_of_zeros_has_no_factors():
    with pytest.raises(CheckpointError, match="only zeros"):
        SVDEmbedding.from_dense(torch.zeros(37, 5), PAD)


def test_the_gradient_of_a_plain_sum_keeps_its_other_rows():
    """It is one number, seen through every row."""
    module = table()
    module.operands(torch.zeros(2, 5))[1].sum().backward()
    assert not module.U.grad[PAD].any() and (module.U.grad[PAD + 1 :] == 1).all()
