"""A checkpoint that is copied takes the place of another as a whole or not at all."""

from __future__ import annotations

import os
from typing import Any, Callable

from spectral_fairseq.compat.patching import Patch, replaces, wrapping
from spectral_fairseq.files import replacing


@wrapping
def atomic(
    src_path: str, dst_path: str, overwrite: bool = False, *, original: Callable[..., Any]
) -> Any:
    """Wrap ``PathManager.copy`` so that its target is either the old file or the whole new one."""
    from fairseq.file_io import PathManager

    is_remote = PathManager.path_requires_pathmanager(dst_path)  # such stores cannot rename
    if is_remote or (os.path.exists(dst_path) and not overwrite):
        return original(src_path, dst_path, overwrite=overwrite)
    with replacing(dst_path) as partial:
        return original(src_path, str(partial), overwrite=True)


ATOMIC_COPY = Patch(
    name="atomic copy",
    reason="checkpoint_best.pt and checkpoint_last.pt are overwritten in place by a copy: training "
    "killed at that moment leaves a truncated file where a good one was.",
    install=replaces({"fairseq.file_io:PathManager.copy": atomic}),
)
