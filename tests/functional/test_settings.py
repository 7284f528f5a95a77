"""Settings of torch that single calls need otherwise, in several threads at once."""

import pytest
import torch

from spectral_fairseq.functional.settings import FLASH, FLOAT32, ONEDNN, Setting, has_onednn_setting


def a_setting(value):
    held = [value]

    def put(new):
        held[0] = new

    return Setting(lambda: held[0], put), held


def test_the_last_call_that_leaves_puts_it_back():
    """As two threads do whose calls overlap; each would put back what it found itself."""
    setting, held = a_setting("bf16")
    first, second = setting.held("ieee"), setting.held("ieee")
    first.__enter__()
    second.__enter__()
    assert held == ["ieee"]
    first.__exit__(None, None, None)
    assert held == ["ieee"]  # the second still computes
    second.__exit__(None, None, None)
    assert held == ["bf16"]


def test_what_is_set_meanwhile_holds_afterwards():
    setting, held = a_setting("bf16")
    with setting.held("ieee"):
        setting.change("none")
        assert held == ["ieee"]
    assert held == ["none"]
    setting.change("bf16")
    assert held == ["bf16"]


def test_a_value_that_is_refused_changes_nothing():
    held = ["bf16"]

    def put(new):
        if new == "unknown":
            raise RuntimeError("no such precision")
        held[0] = new

    setting = Setting(lambda: held[0], put)
    with pytest.raises(RuntimeError), setting.held("unknown"):
        pass
    with setting.held("ieee"):
        assert held == ["ieee"]
    assert held == ["bf16"]


def test_those_of_torch_are_what_they_say():
    kinds = [(FLOAT32, "medium", torch.get_float32_matmul_precision)]
    if hasattr(torch.backends.cuda, "flash_sdp_enabled"):
        kinds.append((FLASH, False, torch.backends.cuda.flash_sdp_enabled))
    if has_onednn_setting():
        kinds.append((ONEDNN, "bf16", lambda: torch.backends.mkldnn.matmul.fp32_precision))
    for setting, value, found in kinds:
        before = found()
        with setting.held(value):
            assert found() == value
        assert found() == before
