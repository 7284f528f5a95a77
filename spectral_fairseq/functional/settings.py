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
    leaves puts back what holds outside of such calls: what was found, or was set meanwhile.
    What is needed already is not set again: torch's older names set several of the newer ones,
    which then no longer follow what is set for everything.

    Args:
        inside: the value that such calls need.
        get: returns what torch has.
        set: makes it another.
    """

    def __init__(self, inside: Any, get: Callable[[], Any], set: Callable[[Any], None]) -> None:
        self._needed, self._get, self._set = inside, get, set
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

    def enter(self) -> None:
        """Begin such a call; :meth:`leave` ends it, perhaps in another thread."""
        with self._lock:
            if not self._outside:
                found = self._get()
                if found != self._needed:
                    self._set(self._needed)  # which torch may refuse
                self._outside = (found,)
            self._inside += 1

    def leave(self) -> None:
        """End it."""
        with self._lock:
            self._inside -= 1
            if not self._inside:
                (value,), self._outside = self._outside, ()
                if value != self._needed:
                    self._set(value)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the value that such calls need inside the block."""
        self.enter()
        try:
            yield
        finally:
            self.leave()


def _fp32_precision(find_owner: Callable[[], Any]) -> Setting:
    def get() -> Any:
        # torch returns what holds, whether it was set here or for everything. Put back here, a
        # value that was set for everything would no longer follow it.
        owner = find_owner()
        holds = owner.fp32_precision
        owner.fp32_precision = "none"
        return "none" if owner.fp32_precision == holds else holds

    return Setting("ieee", get, lambda value: setattr(find_owner(), "fp32_precision", value))


FLASH = Setting(
    True,
    lambda: torch.backends.cuda.flash_sdp_enabled(),
    lambda value: torch.backends.cuda.enable_flash_sdp(value),
)
"""Whether attention may take the flash kernel."""
ONEDNN = _fp32_precision(lambda: getattr(torch.backends.mkldnn, "matmul", None))
"""The precision of float32 products in oneDNN, of torch 2.9 and newer."""
CUDA = _fp32_precision(lambda: torch.backends.cuda.matmul)
"""The precision of float32 products on a GPU, of torch 2.9 and newer."""
FLOAT32 = Setting(
    "highest",
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
