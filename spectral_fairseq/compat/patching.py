"""What a mend reports: whether the host had the defect, and what was done about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Callable

_MARK = "_spectral_fairseq_mend"


class Status(enum.Enum):
    """The three things that can be said of a mend after it was tried."""

    MENDED = "mended"
    NOT_NEEDED = "not needed"
    CANNOT = "cannot be mended"


@dataclass(frozen=True)
class Outcome:
    """Result of applying one mend.

    Args:
        status: what happened.
        detail: what was changed, why nothing had to be, or why nothing could be.
    """

    status: Status
    detail: str


def mended(detail: str) -> Outcome:
    """The defect was present and is cured for the rest of this process."""
    return Outcome(Status.MENDED, detail)


def not_needed(detail: str) -> Outcome:
    """The installed versions do not have the defect."""
    return Outcome(Status.NOT_NEEDED, detail)


def cannot(detail: str) -> Outcome:
    """The defect is, or may be, present and stays."""
    return Outcome(Status.CANNOT, detail)


def is_ours(function: Any) -> bool:
    """Whether ``function`` was put in place by :func:`replace`."""
    return bool(getattr(function, _MARK, ()))


def replace(owner: Any, name: str, wrap: Callable[[Any], Any], kind: Any = None) -> None:
    """Put ``wrap(original)`` in the place of ``owner.name``, once for each ``wrap``.

    Args:
        owner: module or class that holds the function.
        name: the attribute.
        wrap: builds the replacement from the original function; should use ``functools.wraps``,
            so that the host's own function stays reachable as ``__wrapped__``.
        kind: ``staticmethod`` or ``classmethod`` where the original is one.
    """
    original = getattr(owner, name)
    hook = getattr(wrap, "func", wrap)  # of a functools.partial
    # A name rather than the object: a module that is imported anew makes new objects.
    wrapped_by, mine = getattr(original, _MARK, ()), f"{hook.__module__}.{hook.__qualname__}"
    if mine in wrapped_by:
        return
    replacement = wrap(original.__func__ if kind is classmethod else original)
    setattr(replacement, _MARK, (*wrapped_by, mine))
    setattr(owner, name, replacement if kind is None else kind(replacement))
