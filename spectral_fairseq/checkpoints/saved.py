"""The checkpoint files that ``fairseq-train`` saves: whether one exists, and a run's in order.

Nothing here imports torch, so that a wrong path is reported at once.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import List, Union

from spectral_fairseq.errors import CheckpointError
from spectral_fairseq.files import why_not_readable

EPOCH_FILE = re.compile(r"checkpoint(\d+)\.pt")
UPDATE_FILE = re.compile(r"checkpoint_(\d+)_(\d+)\.pt")
"""``checkpoint<epoch>.pt`` and ``checkpoint_<epoch>_<updates>.pt``."""


def checkpoint_file(path: Union[str, os.PathLike[str]]) -> Path:
    """``path``, if there is a regular file.

    Raises:
        CheckpointError: there is none; a pipe, which may have no end, is not read.
    """
    obstacle = why_not_readable(path)
    if obstacle is not None:
        raise CheckpointError(
            f"a checkpoint file at {path}", obstacle, "Check the path; fairseq saves *.pt files."
        )
    return Path(path)


def saved_epochs(folder: Path) -> List[Path]:
    """The checkpoints that one run saved, in the order of training.

    Args:
        folder: a --save-dir.

    Returns:
        ``checkpoint<epoch>.pt`` and ``checkpoint_<epoch>_<updates>.pt``.

    Raises:
        CheckpointError: there are none.
    """
    found = []
    for path in folder.iterdir():
        by_epoch, by_update = EPOCH_FILE.fullmatch(path.name), UPDATE_FILE.fullmatch(path.name)
        if by_update:
            found.append(((int(by_update.group(1)), int(by_update.group(2))), path))
        elif by_epoch:
            # An epoch's own checkpoint comes after those saved within it.
            found.append(((int(by_epoch.group(1)), 2**62), path))
    if not found:
        raise CheckpointError(
            f"checkpoints of a training run in {folder}",
            "none named checkpoint<epoch>.pt or checkpoint_<epoch>_<updates>.pt",
            "Name the --save-dir of a run without --no-epoch-checkpoints, or the files.",
        )
    return [path for _, path in sorted(found)]
