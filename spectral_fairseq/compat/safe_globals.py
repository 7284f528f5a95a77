"""Checkpoints load under torch's ``weights_only`` default, through an allow-list."""

from __future__ import annotations

import argparse
import io
import pickle

import torch

from spectral_fairseq.checkpoints.allow_list import allowed_globals
from spectral_fairseq.compat.patching import Outcome, cannot, mended, not_needed

NAME = "safe globals"
DEFECT = (
    "torch >= 2.6 refuses the plain configuration and numpy objects in fairseq's checkpoints and "
    "in what workers send each other on resuming."
)


def apply() -> Outcome:
    """Allow the plain objects of fairseq's checkpoints; the safety itself stays on."""
    if _loads_namespace():
        return not_needed(f"torch {torch.__version__} does not refuse them")
    if not hasattr(torch.serialization, "add_safe_globals"):
        return cannot(f"torch {torch.__version__} refuses them but has no add_safe_globals")
    allowed = allowed_globals()
    torch.serialization.add_safe_globals(list(allowed))
    if not _loads_namespace():
        return cannot("the allow-list was given to torch but has no effect")
    return mended(f"{len(allowed)} names allowed, all others still refused")


def _loads_namespace() -> bool:
    buffer = io.BytesIO()
    torch.save(argparse.Namespace(), buffer)
    buffer.seek(0)
    try:
        torch.load(buffer)
    except pickle.UnpicklingError:
        return False
    return True
