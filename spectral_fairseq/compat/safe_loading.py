"""fairseq reads its own checkpoints, and never runs code from one, whatever the versions are."""

from __future__ import annotations

import argparse
import contextlib
import io
import pickle
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch

from spectral_fairseq.checkpoints.allowed import allowed_globals
from spectral_fairseq.checkpoints.reading import torch_load
from spectral_fairseq.checkpoints.settings import check_settings
from spectral_fairseq.checkpoints.stand_ins import restored
from spectral_fairseq.compat.patching import Overlay, Patch, replaces
from spectral_fairseq.errors import CheckpointError, first_line

# The modules that call torch.load; those of speech are not imported by every fairseq.
_LOADERS = (
    "fairseq.checkpoint_utils",
    "fairseq.data.codedataset",
    "fairseq.models.speech_to_text.xm_transformer",
    "fairseq.models.text_to_speech.vocoder",
)
_BROADCAST = "fairseq.distributed.utils"  # calls it on what a worker has sent


def with_safe_load(torch_module: types.ModuleType) -> Overlay:
    """An overlay of torch whose ``load`` takes only the allow-list, and settings that are data.

    See Note [A module of their own] in ``patching.py``.
    """
    restricted = with_restricted_load(torch_module)

    def load(f: Any, *args: Any, **options: Any) -> Any:
        loaded = restricted.load(f, *args, **options)
        if isinstance(loaded, dict) and "model" in loaded:
            check_settings(loaded, getattr(f, "name", f))  # before fairseq looks at it
        return loaded

    return Overlay(torch_module, load=load)


def with_restricted_load(torch_module: types.ModuleType) -> Overlay:
    """An overlay of torch whose ``load`` takes only the allow-list, whatever its caller asks for.

    It is for what one worker sends to others: a checkpoint that it has checked when it read it, and
    in which placeholders stand for tensors that follow.
    """

    def load(
        f: Any,
        map_location: Any = None,
        pickle_module: Any = None,  # noqa: ARG001  (the reader of this package is taken)
        *,
        weights_only: Any = None,  # noqa: ARG001  (always on)
        **options: Any,
    ) -> Any:
        loaded = torch_load(f, map_location=map_location, **options)
        return restored(loaded, getattr(f, "name", f))

    return Overlay(torch_module, load=load)


def _install_safe_loading() -> str:
    changed = replaces(
        {
            **{f"{name}:torch": with_safe_load for name in _LOADERS if name in sys.modules},
            f"{_BROADCAST}:torch": with_restricted_load,
        }
    )()
    if hasattr(torch.serialization, "add_safe_globals"):  # for plugins that call torch.load
        torch.serialization.add_safe_globals(list(allowed_globals()))
    tried = _try()
    return f"{len(allowed_globals())} names are allowed, all others refused; {changed}{tried}"


class _Foreign:
    """An object outside the allow-list: loading it calls a function, which does nothing."""

    def __reduce__(self) -> Any:
        return _rebuild_foreign, ()


def _rebuild_foreign() -> None:
    return None


def _try() -> str:
    """Let fairseq's loader read a checkpoint that it should refuse, and one that it should take.

    Returns:
        Why that was not tried, if no file can be written; the patch is in force then, too.

    Raises:
        RuntimeError: it did otherwise.
    """
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}}
    checkpoint = {
        "args": None,
        "cfg": None,
        "model": {},
        "optimizer_history": [{**history, "num_updates": 0}],
        "extra_state": {"train_iterator": {"epoch": 1}},
    }
    with contextlib.ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for name, value in (("foreign", _Foreign()), ("plain", argparse.Namespace())):
                whole = io.BytesIO()
                torch.save({**checkpoint, "probe": value}, whole)
                (folder / name).write_bytes(whole.getvalue())
        except OSError as error:
            return f"; not tried, since no temporary file can be written ({first_line(error)})"
        if _takes(folder / "foreign") or not _takes(folder / "plain"):
            raise RuntimeError("it loads checkpoints in a way that is not known here")
    return ""


def _takes(path: Path) -> bool:
    """Whether fairseq's loader takes a checkpoint."""
    from fairseq import checkpoint_utils

    try:
        checkpoint_utils.load_checkpoint_to_cpu(str(path))
    except (pickle.UnpicklingError, CheckpointError):
        return False
    return True


SAFE_LOADING = Patch(
    name="safe loading",
    reason="Depending on the versions, fairseq's loader refuses the plain settings in its own "
    "checkpoints (torch >= 2.6), or runs whatever code a file holds (older torch, and fairseq of "
    "2025-09, which asks for weights_only=False).",
    install=_install_safe_loading,
)
