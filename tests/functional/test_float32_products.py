import pytest
import torch
import torch.nn.functional as F

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional import float32_products as products
from spectral_fairseq.functional.cpu_attention import has_flash_kernel
from spectral_fairseq.functional.float32_products import (
    Products,
    choose_products,
    float32_products,
    using_products,
)
from spectral_fairseq.functional.processor import Processor

pytestmark = pytest.mark.usefixtures("products_as_torch_comes")

EPYC = Processor("AuthenticAMD", frozenset({"avx2", "avx512f", "avx512_bf16"}), "AMD EPYC 9R45")
HAS_SETTING = products._has_setting()
needs_setting = pytest.mark.skipif(not HAS_SETTING, reason="this torch has no setting for oneDNN")


def state():
    found = [getattr(torch.backends.cuda, "flash_sdp_enabled", lambda: None)()]
    if HAS_SETTING:
        return [*found, torch.backends.mkldnn.matmul.fp32_precision]
    return [*found, torch.get_float32_matmul_precision()]


@pytest.fixture
def on(monkeypatch):
    def set_processor(found, errors=(2.4e-7, 4.1e-7)):
        monkeypatch.setattr(products, "processor", lambda: found)
        monkeypatch.setattr(products, "_error", lambda fast: errors[fast])

    return set_processor


@needs_setting
@pytest.mark.parametrize(
    ("found", "errors", "fast"),
    [
        (EPYC, (2.4e-7, 4.1e-7), True),
        (EPYC, (2.4e-7, 4.9e-7), False),  # more than twice the error
        (EPYC._replace(flags=EPYC.flags | {"amx_tile", "amx_bf16"}), (2.4e-7, 2.4e-7), False),
        (EPYC._replace(flags=frozenset({"avx2"})), (2.4e-7, 2.4e-7), False),
        (EPYC._replace(vendor="GenuineIntel"), (2.4e-7, 2.4e-7), False),
        (Processor("", frozenset(), "arm64"), (2.4e-7, 2.4e-7), False),
    ],
)
def test_auto_takes_onednn_on_amd_with_avx512_at_equal_precision(on, found, errors, fast):
    on(found, errors)
    assert choose_products().fast is fast
    assert choose_products("torch").fast is False
    assert choose_products("fast").fast is True


def test_auto_is_as_torch_comes_without_the_setting(on, monkeypatch):
    on(EPYC)
    monkeypatch.setattr(products, "_has_setting", lambda: False)
    assert not choose_products().fast


def test_another_choice_is_refused():
    with pytest.raises(ConfigurationError, match="auto, fast, torch"):
        choose_products("quick")


@pytest.mark.parametrize("fast", [False, True])
def test_everything_is_put_back_as_it_was_found(fast):
    before = state()
    with using_products(Products(fast, "")):
        assert (state() != before) is fast
        with using_products(Products(True, "")):
            pass
        assert (state() != before) is fast
    assert state() == before


@pytest.mark.parametrize("half_precision", [False, True])
def test_blocks_that_overlap_put_it_back_when_the_last_one_ends(half_precision):
    """As in two threads; each put back what it had found, which was the other one's."""
    before = state()
    first = using_products(Products(True, ""))
    second = using_products(Products(True, ""), half_precision)
    first.__enter__()
    inside = state()
    second.__enter__()
    first.__exit__(None, None, None)
    assert state() == inside != before
    second.__exit__(None, None, None)
    assert state() == before


def test_attention_takes_its_other_form_beside_onednn(on):
    if not has_flash_kernel():
        pytest.skip("this torch has no flash attention for CPUs to switch")
    with using_products(Products(True, "")):
        assert not torch.backends.cuda.flash_sdp_enabled()
    on(EPYC)
    with using_products(Products(False, ""), half_precision=True):
        assert not torch.backends.cuda.flash_sdp_enabled()
    on(EPYC._replace(vendor="GenuineIntel"))
    with using_products(Products(False, ""), half_precision=True):
        assert torch.backends.cuda.flash_sdp_enabled()
        assert not hasattr(F.scaled_dot_product_attention, "is_chosen_by_length")
    on(EPYC._replace(vendor="GenuineIntel", flags=frozenset({"avx512_bf16", "amx_bf16"})))
    with using_products(Products(False, ""), half_precision=True):
        assert torch.backends.cuda.flash_sdp_enabled()
        assert hasattr(F.scaled_dot_product_attention, "is_chosen_by_length")
    with float32_products("torch", half_precision=True):
        assert hasattr(F.scaled_dot_product_attention, "is_chosen_by_length")
    with float32_products("torch"):
        assert not hasattr(F.scaled_dot_product_attention, "is_chosen_by_length")


def test_attention_of_somebody_else_is_kept(monkeypatch):
    if not has_flash_kernel():
        pytest.skip("this torch has no flash attention for CPUs to switch")
    theirs = lambda *given, **options: torch.zeros(())  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    with using_products(Products(True, "")):
        assert F.scaled_dot_product_attention.__wrapped__ is theirs
    assert F.scaled_dot_product_attention is theirs


def test_a_choice_that_fails_changes_nothing(monkeypatch):
    def refused(amx):
        raise RuntimeError("no attention")

    if not has_flash_kernel():
        pytest.skip("this torch has no flash attention for CPUs to switch")
    monkeypatch.setattr(products, "choose_attention", refused)
    before = state()
    with pytest.raises(RuntimeError, match="no attention"), using_products(Products(True, "")):
        pass
    assert state() == before and not products._in_force


def test_a_product_keeps_the_precision_of_float32():
    with float32_products() as chosen:
        left, right = torch.randn(100, 300), torch.randn(300, 50)
        exact = left.double() @ right.double()
        error = ((left @ right).double() - exact).norm() / exact.norm()
    assert error < 1e-6
    assert str(chosen).split(":")[0] in ("oneDNN", "as torch comes")


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_error_is_that_of_float32(default):
    """It was that of the default type of torch, or of autocast."""
    torch.set_default_dtype(default)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            error = products._error.__wrapped__(fast=False)
    finally:
        torch.set_default_dtype(torch.float32)
    assert 0 < error < 1e-6


def test_the_choice_depends_on_no_random_numbers_and_no_time():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert choose_products() == choose_products()
    products._error.cache_clear()
    products._error(True)
    assert torch.equal(torch.get_rng_state(), before)


def test_bfloat16_is_looked_for_in_the_flags():
    assert EPYC.has_bfloat16 and not EPYC._replace(flags=frozenset({"avx2"})).has_bfloat16
    assert Processor("", frozenset(), "unknown").has_bfloat16


def test_both_products_are_timed_for_information():
    before, threads = state(), torch.get_num_threads()
    found = products.timed_products(size=8, turns=1)
    assert (found is not None) is HAS_SETTING
    assert found is None or min(found) > 0
    assert (state(), torch.get_num_threads()) == (before, threads)
