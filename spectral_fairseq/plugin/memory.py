"""Freed memory is kept for the next tensors.

glibc hands the memory of large tensors back to the system as soon as they are freed, and the
system clears new pages for the next ones: in bfloat16 at the small size of docs/speed.md a tenth
of an update. glibc's own variables come first.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

KEPT_BYTES = 2**30  # A tensor that is larger is handed back.
_OLDER_LIMIT = 2**25  # what older versions of glibc take as M_MMAP_THRESHOLD at most
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _NEVER = -1, -3, -1
ALLOCATOR_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let glibc keep the memory of freed tensors in this process, and return whether it will."""
    if any(name in os.environ for name in ALLOCATOR_VARIABLES) or not _glibc_allocates():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    for kept in (KEPT_BYTES, _OLDER_LIMIT):
        if mallopt(_M_MMAP_THRESHOLD, kept):
            mallopt(_M_TRIM_THRESHOLD, _NEVER)
            return True
    return False


class _Place(ctypes.Structure):
    """``Dl_info``: the library that an address lies in."""

    _fields_ = [
        ("path", ctypes.c_char_p),
        ("start", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def _glibc_allocates() -> bool:
    """Whether ``malloc`` is glibc's.

    Others (jemalloc, tcmalloc, mimalloc) are loaded before it, and leave its ``mallopt`` where it
    is, or have one that does nothing.
    """
    if os.name != "posix":
        return False
    loaded = ctypes.CDLL(None)
    try:
        functions = (loaded.malloc, loaded.mallopt, loaded.gnu_get_libc_version)
        find_place = loaded.dladdr
    except AttributeError:  # macOS, musl
        return False
    return len({_library_of(function, find_place) for function in functions}) == 1


def _library_of(function: Any, find_place: Any) -> Any:
    place = _Place()
    find_place(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(place))
    return place.start
