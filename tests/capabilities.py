"""What the installed torch can do, for tests that would say nothing about this package there."""

import importlib

import pytest
import torch

from spectral_fairseq.provenance import torch_release


def _multiplies_halves() -> bool:
    try:
        torch.zeros(1, 1, dtype=torch.float16).mm(torch.zeros(1, 1, dtype=torch.float16))
        return True
    except RuntimeError:
        return False


def _normalises_halves() -> bool:
    try:
        torch.nn.functional.layer_norm(torch.zeros(1, 2, dtype=torch.float16), (2,))
        return True
    except RuntimeError:
        return False


def _attends_under_autocast() -> bool:
    layer, x = torch.nn.MultiheadAttention(4, 1), torch.zeros(2, 1, 4)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(x, x, x, attn_mask=torch.zeros(2, 2), need_weights=False)
        return True
    except RuntimeError:
        return False


def _watches_operators() -> bool:
    module = importlib.import_module("torch.utils._python_dispatch")
    return not hasattr(module, "push_torch_dispatch_mode")  # the form of torch < 1.13


HALF_ON_CPU = pytest.mark.skipif(
    not _multiplies_halves(), reason="this torch multiplies no float16 on a CPU"
)
HALF_LAYERS_ON_CPU = pytest.mark.skipif(
    not _normalises_halves(), reason="this torch normalises no float16 on a CPU"
)
AUTOCAST_ATTENTION = pytest.mark.skipif(
    not _attends_under_autocast(), reason="this torch takes no float32 mask under autocast"
)
WATCHING = pytest.mark.skipif(
    not _watches_operators(), reason="this torch has no modes that watch operators"
)
# Flags of torch.load that let it run code, as a careless reader would.
LOAD_ANYTHING = {"weights_only": False} if torch_release() >= (1, 13) else {}
WEIGHTS_ONLY = pytest.mark.skipif(
    torch_release() < (1, 13), reason="this torch has no weights_only"
)
MUON = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="this torch has no Muon: 2.9 or newer has"
)
FLOAT16 = pytest.param(torch.float16, marks=HALF_ON_CPU)
