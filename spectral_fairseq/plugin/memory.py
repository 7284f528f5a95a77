"""Freed memory is kept for the next tensors.

glibc hands the memory of large tensors back to the system as soon as they are freed, and the
system clears new pages for the next ones: in bfloat16 at the small size of docs/speed.md a tenth
of an update. glibc's own variables come first, and other libraries of C have no such setting. Where
another allocator stands in for glibc's, it sets nothing.
"""

from __future__ import annotations

import ctypes
import os

KEPT_BYTES = 2**30  # A tensor that is larger is handed back.
_OLDER_LIMIT = 2**25  # what older versions of glibc take as M_MMAP_THRESHOLD at most
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _NEVER = -1, -3, -1
ALLOCATOR_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors in this process."""
    if os.name != "posix" or any(name in os.environ for name in ALLOCATOR_VARIABLES):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # macOS and musl have none
    if mallopt and (
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES) or mallopt(_M_MMAP_THRESHOLD, _OLDER_LIMIT)
    ):
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
