"""A saved checkpoint is replaced in one step, never overwritten piece by piece."""

from __future__ import annotations

import functools
import os
from typing import Any, Callable

from spectral_fairseq.compat.patching import Outcome, is_ours, mended, not_needed, replace

NAME = "atomic copy"
DEFECT = (
    "checkpoint_best.pt and checkpoint_last.pt are overwritten in place by a copy: training killed "
    "at that moment leaves a truncated file where a good one was."
)


def apply() -> Outcome:
    """Copy next to the target, then rename over it."""
    from fairseq.file_io import PathManager

    if is_ours(PathManager.copy):
        return not_needed("done before in this process")
    is_remote = PathManager.path_requires_pathmanager
    replace(PathManager, "copy", functools.partial(atomic, is_remote=is_remote), staticmethod)
    return mended("fairseq.file_io.PathManager.copy replaces its target in one step")


def atomic(copy: Callable[..., Any], is_remote: Callable[[str], bool]) -> Callable[..., Any]:
    """Wrap a file copy so that its target is either the old file or the whole new one.

    Args:
        copy: copies ``src_path`` to ``dst_path``.
        is_remote: whether a path lies in a store without renaming; copied as before.

    Returns:
        A function of the same signature.
    """

    @functools.wraps(copy)
    def copy_then_rename(src_path: str, dst_path: str, overwrite: bool = False) -> Any:
        if is_remote(dst_path) or (os.path.exists(dst_path) and not overwrite):
            return copy(src_path, dst_path, overwrite=overwrite)
        target = os.path.realpath(dst_path)  # keep a link: replace what it points to
        partial = target + ".tmp"
        copied = copy(src_path, partial, overwrite=True)
        os.replace(partial, target)
        return copied

    return copy_then_rename
