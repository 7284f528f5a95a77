"""A checkpoint that fairseq cannot read ends in an error that names the file and the remedy.

This patch mostly changes error messages. It is worth its lines because a truncated checkpoint is
what a full disk or a killed copy leaves, on the day when the run has to be resumed: the user
needs to learn that another checkpoint of the run will do. It also keeps fairseq from waiting for
a pipe and from inflating an archive of zeros.
"""

from __future__ import annotations

import os
from typing import Any, Callable, Dict

from spectral_fairseq.checkpoints import archive
from spectral_fairseq.checkpoints.reading import (
    READ_FAILURES,
    explain_failure,
    not_fairseq,
)
from spectral_fairseq.checkpoints.saved import checkpoint_file
from spectral_fairseq.compat.patching import Patch, replaces, wrapping
from spectral_fairseq.errors import SpectralFairseqError


@wrapping
def explain(
    path: str, *args: Any, original: Callable[..., Dict[str, Any]], **kwargs: Any
) -> Dict[str, Any]:
    """Wrap fairseq's loader so that it raises :class:`CheckpointError`.

    Missing and forbidden files keep the system's error, which names them.
    """
    try:
        if os.path.exists(path):  # else a remote path, or an error of fairseq's own
            file = checkpoint_file(path)
            archive.check_one_archive(archive.entries(file), file)
        state = original(path, *args, **kwargs)
    except (SpectralFairseqError, FileNotFoundError, PermissionError):
        raise
    except KeyError as error:
        # A dictionary without the entries that fairseq upgrades old checkpoints from.
        raise not_fairseq(path, {"... (no entry " + str(error) + ")": None}) from error
    except READ_FAILURES as error:
        if not os.path.isfile(path):  # a remote path: fairseq's own error says more
            raise
        raise explain_failure(path, error) from error
    return state


DAMAGED_CHECKPOINT = Patch(
    name="damaged checkpoint",
    reason="A truncated, damaged or foreign checkpoint fails with torch's internal error, which "
    "names neither the file nor what to do.",
    install=replaces({"fairseq.checkpoint_utils:load_checkpoint_to_cpu": explain}),
)
