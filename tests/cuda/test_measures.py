"""What is computed from a table or from outputs, on the device on which they lie."""

from types import SimpleNamespace

import pytest
import torch

from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.functional.blockwise_spectrum import BlockwiseSpectrum
from spectral_fairseq.functional.empirical_rank import cumulative_share
from spectral_fairseq.functional.gram import gram
from spectral_fairseq.functional.hidden_states import StateStatistics
from spectral_fairseq.functional.isotropy import log_partition
from spectral_fairseq.functional.pairwise_kl import ExpectedPairwiseKL
from spectral_fairseq.functional.precision import full_float32
from spectral_fairseq.plugin.factor_renewal import renew_factors
from tests.functional.test_spectra import right_singular_system

virtual = pytest.importorskip(
    "tests.cuda.virtual_cuda", reason="needs torch 2.2", exc_type=ImportError
)


@pytest.mark.parametrize("rows", [3, 12])
def test_accumulated_measures(rows):
    log_p = torch.randn(rows, 7).log_softmax(-1)

    def measured(block):
        spectrum, divergence = BlockwiseSpectrum(rows, 7), ExpectedPairwiseKL(7)
        for part in block.split(2):
            spectrum.add(part)
            divergence.add(part)
        sigma = spectrum.singular_values()
        return sigma.cpu(), divergence.value(), cumulative_share(sigma, (0.1, 0.5, 1.0))

    expected = measured(log_p)
    with virtual.virtual_cuda():
        found = measured(log_p.cuda())
    torch.testing.assert_close(found, expected)


def test_measures_take_tensors_on_a_gpu():
    torch.manual_seed(0)
    table, states = torch.randn(40, 4), torch.randn(30, 4) + 1

    def measured(move):
        statistics = StateStatistics(4)
        statistics.add(move(states))
        sigma, axes = (move(part) for part in right_singular_system(table))
        log_z = log_partition(move(table), axes)
        return (
            statistics.isoscore(),
            statistics.mean_cosine(),
            log_z.cpu(),
        )

    expected = measured(torch.Tensor.clone)
    with virtual.virtual_cuda():
        found = measured(torch.Tensor.cuda)
    torch.testing.assert_close(found, expected)


def test_a_table_is_drawn_anew_where_it_lies():
    torch.manual_seed(1)
    expected = SVDEmbedding(11, 4, 1).dense()
    with virtual.virtual_cuda():
        table = SVDEmbedding(11, 4, 1).cuda()
        torch.manual_seed(1)
        table.reset_parameters()
        torch.testing.assert_close(table.dense().cpu(), expected)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_tf32_is_off_where_singular_values_are_computed(precision, monkeypatch):
    seen = []
    matmul = torch.Tensor.__matmul__

    def watched(left, right):
        seen.append(torch.get_float32_matmul_precision())
        return matmul(left, right)

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    torch.set_float32_matmul_precision(precision)
    try:
        with virtual.virtual_cuda():
            gram(torch.ones(5, 3).cuda(), torch.tensor([0]).cuda())
        assert seen == ["highest", "highest"]
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")


def _has_newer_setting():
    try:
        return bool(torch.backends.cuda.matmul.fp32_precision)
    except (AssertionError, AttributeError):  # what torch before 2.9 raises
        return False


@pytest.mark.skipif(not _has_newer_setting(), reason="the setting came later")
def test_the_newer_setting_of_tf32_is_restored():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        with full_float32(torch.device("cuda")):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


def test_renewed_factors_stay_on_their_device():
    with virtual.virtual_cuda():
        table = SVDEmbedding(12, 5, padding_idx=1).cuda()
        optimizer = torch.optim.Adam(table.parameters())
        for _ in range(2):
            table(torch.arange(12).cuda()).square().sum().backward()
            optimizer.step()
        wrapper = SimpleNamespace(optimizer=optimizer)
        renew_factors(table, wrapper, lambda compute, _like: compute())
        state = [value for found in optimizer.state.values() for value in found.values()]
        moments = [value for value in state if value.dim() > 0]
        assert moments and all(map(virtual.on_gpu, [table.U, table.sigma, table.V, *moments]))
