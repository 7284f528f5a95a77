"""Whether there is a checkpoint or a model at a path, and the checkpoints of a run in order.

Nothing here imports torch, so that a wrong path is reported at once.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import List, Optional, Union

from spectral_fairseq.errors import CheckpointError, ForbiddenError, check_enough
from spectral_fairseq.files import check_file, names_in

OF_DISTRIBUTED = (
    "If torch.distributed.checkpoint wrote it (.distcp), make one file of its folder: "
    "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER model.pt."
)
EPOCH_FILE = re.compile(r"checkpoint(\d+)\.pt")
UPDATE_FILE = re.compile(r"checkpoint_(\d+)_(\d+)\.pt")
"""``checkpoint<epoch>.pt`` and ``checkpoint_<epoch>_<updates>.pt``."""

STEP_FOLDER = re.compile(r"checkpoint-(\d+)")
"""``checkpoint-<updates>``, a model's folder that transformers' Trainer saves."""

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""The weights in a model's folder of Hugging Face's libraries, in the order of transformers."""

PART = re.compile(
    r"((pytorch_)?model-\d+-of-\d+|consolidated([-.]\d+(-of-\d+)?)?)\.(safetensors|bin|pt|pth)"
)
"""Weights in several files without an index, and those in the form of Llama and Mistral."""


def checkpoint_file(path: Union[str, os.PathLike[str]]) -> Path:
    """``path``, if there is a regular file.

    Raises:
        CheckpointError: there is none; a pipe, which may have no end, is not read.
    """
    remedy = "Check the path; a model on a hub has to be downloaded first."
    check_file(path, "a checkpoint or model", remedy, CheckpointError)
    return Path(path)


def weights_file(folder: Path) -> Optional[Path]:
    """The weights in a model's folder: one file, the index of several, or the first part."""
    names = [*WEIGHTS, *filter(PART.fullmatch, names_in(folder))]
    return next((folder / name for name in names if os.path.isfile(folder / name)), None)


def model_file(path: Union[str, os.PathLike[str]]) -> Path:
    """The file to read of a model: ``path``, or the weights if it is a folder.

    Raises:
        CheckpointError: there is none of them.
    """
    file = weights_file(Path(path)) if os.path.isdir(path) else checkpoint_file(path)
    if file is None:
        found = f"a folder without {', '.join(WEIGHTS)}"
        remedy = f"Name a file, or the folder of a model. {OF_DISTRIBUTED}"
        raise CheckpointError(f"a model at {path}", found, remedy)
    return file


def paths_in(folder: Path) -> List[Path]:
    """What is in a folder of checkpoints, in the order of the names.

    Raises:
        ForbiddenError: it may not be listed.
    """
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise ForbiddenError(f"a folder of checkpoints at {folder}", str(error)) from error


def saved_epochs(folder: Path) -> List[Path]:
    """The checkpoints that one run saved, in the order of training.

    Args:
        folder: a --save-dir of fairseq, or an output folder of transformers' Trainer.

    Returns:
        ``checkpoint<epoch>.pt`` and ``checkpoint_<epoch>_<updates>.pt``, or the folders
        ``checkpoint-<updates>``.

    Raises:
        CheckpointError: there are none.
    """
    dated = []
    for path in paths_in(folder):
        by_step = STEP_FOLDER.fullmatch(path.name)
        if by_step and os.path.isdir(path) and weights_file(path) is not None:
            dated.append(((0, int(by_step.group(1))), path))
        by_epoch, by_update = EPOCH_FILE.fullmatch(path.name), UPDATE_FILE.fullmatch(path.name)
        if by_update:
            dated.append(((int(by_update.group(1)), int(by_update.group(2))), path))
        elif by_epoch:
            # An epoch's own checkpoint comes after those saved within it.
            dated.append(((int(by_epoch.group(1)), 2**62), path))
    what = "checkpoint<epoch>.pt, checkpoint_<epoch>_<updates>.pt or checkpoint-<updates>"
    remedy = "Name the --save-dir of a run without --no-epoch-checkpoints, or the files."
    check_enough(len(dated), 1, f"{what} in {folder}", remedy, CheckpointError)
    return [path for _, path in sorted(dated)]
