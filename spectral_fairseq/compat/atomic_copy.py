"""A saved checkpoint is replaced in one step, never overwritten piece by piece."""

from __future__ import annotations

import functools
import os
from typing import Any, Callable

from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.files import replacing


def atomic(copy: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``PathManager.copy`` so that its target is either the old file or the whole new one.

    Args:
        copy: copies ``src_path`` to ``dst_path``.

    Returns:
        A function of the same signature.
    """
    from fairseq.file_io import PathManager

    @functools.wraps(copy)
    def copy_then_rename(src_path: str, dst_path: str, overwrite: bool = False) -> Any:
        is_remote = PathManager.path_requires_pathmanager(dst_path)  # such stores cannot rename
        if is_remote or (os.path.exists(dst_path) and not overwrite):
            return copy(src_path, dst_path, overwrite=overwrite)
        with replacing(dst_path) as partial:
            return copy(src_path, str(partial), overwrite=True)

    return copy_then_rename


PATCH = Patch(
    name="atomic copy",
    reason="checkpoint_best.pt and checkpoint_last.pt are overwritten in place by a copy: training "
    "killed at that moment leaves a truncated file where a good one was.",
    install=replaces({"fairseq.file_io:PathManager.copy": atomic}),
)
