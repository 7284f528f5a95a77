"""Process-wide settings of torch that some calls have to change for their duration."""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext
from typing import Any, Callable, ContextManager, Iterator, Tuple

import torch


class Setting:
    """A process-wide setting of torch, changed while at least one call needs it.

    Calls that need another value may be made in several threads at once, and a backward pass after
    everything else has ended. The first call that enters changes the setting, and the last one that
    leaves puts back what holds outside of such calls: what was found, or was set meanwhile. All
    calls that enter need the same value.

    Args:
        get: returns what torch has.
        set: makes it another.
    """

    def __init__(self, get: Callable[[], Any], set: Callable[[Any], None]) -> None:
        self._get, self._set = get, set
        self._lock = threading.Lock()
        self._inside = 0
        self._outside: Tuple[Any, ...] = ()  # what holds outside, while there are calls inside

    def change(self, value: Any) -> Any:
        """Change what holds outside of such calls, and return what held there."""
        with self._lock:
            if self._outside:
                (before,), self._outside = self._outside, (value,)
            else:
                before = self._get()
                self._set(value)
        return before

    def enter(self, value: Any) -> None:
        """Begin a call that needs this value; :meth:`leave` ends it, perhaps in another thread."""
        with self._lock:
            if not self._outside:
                found = self._get()
                self._set(value)  # which torch may refuse
                self._outside = (found,)
            self._inside += 1

    def leave(self) -> None:
        """End it."""
        with self._lock:
            self._inside -= 1
            if not self._inside:
                (value,), self._outside = self._outside, ()
                self._set(value)

    @contextmanager
    def held(self, value: Any) -> Iterator[None]:
        """Have this value inside the block."""
        self.enter(value)
        try:
            yield
        finally:
            self.leave()


def _of_attribute(find_owner: Callable[[], Any], name: str) -> Setting:
    return Setting(
        lambda: getattr(find_owner(), name), lambda value: setattr(find_owner(), name, value)
    )


FLASH = Setting(
    lambda: torch.backends.cuda.flash_sdp_enabled(),
    lambda value: torch.backends.cuda.enable_flash_sdp(value),
)
"""Whether attention may take the flash kernel."""
ONEDNN = _of_attribute(lambda: getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision")
"""The precision of float32 products in oneDNN, of torch 2.9 and newer."""
CUDA = _of_attribute(lambda: torch.backends.cuda.matmul, "fp32_precision")
"""The precision of float32 products on a GPU, of torch 2.9 and newer."""
FLOAT32 = Setting(
    lambda: torch.get_float32_matmul_precision(),
    lambda value: torch.set_float32_matmul_precision(value),
)
"""The same by the older name, which torch refuses to read where the newer one was used."""


def new_tensors_on(device: str) -> ContextManager[Any]:
    """Make tensors on this device where none is named, whatever ``torch.set_default_device`` says.

    It holds in this thread, to the end of the block. Before torch 2.0 there is no default device.
    """
    chosen: Any = torch.device(device)
    return chosen if hasattr(chosen, "__enter__") else nullcontext()


def has_onednn_setting() -> bool:
    """Whether this torch has a precision of products in oneDNN alone."""
    return hasattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision")
