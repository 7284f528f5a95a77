"""Settings of torch that single calls need otherwise, in several threads at once."""

import pytest
import torch

from spectral_fairseq.functional.float32_products import Products, using_products
from spectral_fairseq.functional.settings import (
    CUDA,
    FLASH,
    FLOAT32,
    ONEDNN,
    Setting,
    has_onednn_setting,
)


def a_setting(value):
    held = [value]

    def put(new):
        held[0] = new

    return Setting("ieee", lambda: held[0], put), held


def test_the_last_call_that_leaves_puts_it_back():
    """As two threads do whose calls overlap; each would put back what it found itself."""
    setting, held = a_setting("bf16")
    first, second = setting.held(), setting.held()
    first.__enter__()
    second.__enter__()
    assert held == ["ieee"]
    first.__exit__(None, None, None)
    assert held == ["ieee"]  # the second still computes
    second.__exit__(None, None, None)
    assert held == ["bf16"]


def test_what_is_set_meanwhile_holds_afterwards():
    setting, held = a_setting("bf16")
    with setting.held():
        setting.change("none")
        assert held == ["ieee"]
    assert held == ["none"]
    setting.change("bf16")
    assert held == ["bf16"]


def test_a_value_that_is_refused_changes_nothing():
    held, known = ["bf16"], ["bf16"]

    def put(new):
        if new not in known:
            raise RuntimeError("no such precision")
        held[0] = new

    setting = Setting("ieee", lambda: held[0], put)
    with pytest.raises(RuntimeError), setting.held():
        pass
    known.append("ieee")
    with setting.held():
        assert held == ["ieee"]
    assert held == ["bf16"]


@pytest.mark.usefixtures("products_as_torch_comes")
def test_those_of_torch_are_what_they_say():
    kinds = [(FLOAT32, "medium", "highest", torch.get_float32_matmul_precision)]
    if hasattr(torch.backends.cuda, "flash_sdp_enabled"):
        kinds.append((FLASH, False, True, torch.backends.cuda.flash_sdp_enabled))
    if has_onednn_setting():
        precision = lambda: torch.backends.mkldnn.matmul.fp32_precision  # noqa: E731
        kinds.append((ONEDNN, "bf16", "ieee", precision))
    for setting, outside, inside, found in kinds:
        before = setting.change(outside)
        with setting.held():
            assert found() == inside
        assert found() == outside
        setting.change(before)
        assert found() == before


@pytest.fixture
def newer_names(products_as_torch_comes):
    """The precisions by torch's newer names, which are put back."""
    if not has_onednn_setting():
        pytest.skip("this torch has no newer names")
    yield torch.backends
    for owner in (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        owner.fp32_precision = "none"


def test_what_was_set_for_everything_is_still_followed(newer_names):
    """What was put back stayed for good, and with it TF32 after it was switched off."""
    newer_names.fp32_precision = "tf32"
    for setting in (CUDA, ONEDNN):
        with setting.held():
            pass
    newer_names.fp32_precision = "ieee"
    assert newer_names.cuda.matmul.fp32_precision == "ieee"
    assert newer_names.mkldnn.matmul.fp32_precision == "ieee"
    newer_names.cuda.matmul.fp32_precision = "tf32"
    with CUDA.held():
        assert newer_names.cuda.matmul.fp32_precision == "ieee"
    assert newer_names.cuda.matmul.fp32_precision == "tf32"


def test_the_older_name_is_not_set_to_what_it_is(newer_names):
    """It would set the newer names too, which would then follow nothing."""
    with FLOAT32.held():
        pass
    newer_names.fp32_precision = "tf32"
    assert newer_names.cuda.matmul.fp32_precision == "tf32"


def test_fast_products_on_a_gpu_beside_the_newer_names(newer_names, monkeypatch):
    """They read torch's older name, which torch refuses then, and left oneDNN changed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    newer_names.cuda.matmul.fp32_precision = "tf32"
    before = newer_names.mkldnn.matmul.fp32_precision
    with using_products(Products(True, "")):
        assert newer_names.cuda.matmul.fp32_precision == "tf32"
        assert newer_names.mkldnn.matmul.fp32_precision == "bf16"
    newer_names.cuda.matmul.fp32_precision = "none"
    with using_products(Products(True, "")):
        assert newer_names.cuda.matmul.fp32_precision == "tf32"
    assert newer_names.cuda.matmul.fp32_precision == before
    assert newer_names.mkldnn.matmul.fp32_precision == before
