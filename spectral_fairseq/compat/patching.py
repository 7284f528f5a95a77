"""The form of a patch of fairseq, and how patches are applied and reported."""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import logging
import types
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

logger = logging.getLogger(__name__)

_MARK = "_spectral_fairseq_patches"

Wrap = Callable[[Any], Any]


class Status(enum.Enum):
    """What became of a patch in this process."""

    PATCHED = "patched"
    NOT_NEEDED = "not needed"
    CANNOT = "cannot be patched"


@dataclass(frozen=True)
class Patch:
    """One change of fairseq, valid for this process only.

    Args:
        name: short name, as shown by ``spectral-fairseq doctor``.
        reason: one sentence: the defect that it cures, or what a feature needs.
        install: changes fairseq and returns what was changed; usually :func:`replaces`. Does
            nothing the second time, and raises if fairseq is not as expected.
        unneeded: returns why the installed versions do not need the patch, or None if they do.
    """

    name: str
    reason: str
    install: Callable[[], str]
    unneeded: Callable[[], Optional[str]] = lambda: None


@dataclass(frozen=True)
class Applied:
    """A patch and what became of it.

    Args:
        patch: the patch.
        status: whether fairseq is patched.
        detail: what was changed, why nothing had to be, or why nothing could be.
    """

    patch: Patch
    status: Status
    detail: str


_applied: Dict[str, Applied] = {}


def apply_all(patches: Sequence[Patch]) -> List[Applied]:
    """Apply patches, each once in a process; later calls only report.

    Never raises: a patch that fails is reported as one that cannot be applied, with the reason,
    so that a fairseq of an unknown version still starts.
    """
    obstacle = why_not_importable()
    new = [patch for patch in patches if patch.name not in _applied]
    if new and obstacle is not None:
        logger.warning(obstacle)
    for patch in new:
        _applied[patch.name] = _apply(patch, obstacle)
    return [_applied[patch.name] for patch in patches]


@functools.cache  # a second attempt finds fairseq half imported
def why_not_importable() -> Optional[str]:
    """What happens on importing fairseq, or None if nothing does."""
    # At every import fairseq logs that a package of its speech tasks is missing.
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    try:
        importlib.import_module("fairseq")
    except Exception as error:  # fairseq 0.12.2 fails with a ValueError on Python >= 3.11
        return f"fairseq cannot be imported: {type(error).__name__}: {error}"
    return None


def _apply(patch: Patch, obstacle: Optional[str]) -> Applied:
    if obstacle is not None:
        return Applied(patch, Status.CANNOT, obstacle)
    try:
        unneeded = patch.unneeded()
        if unneeded is not None:
            return Applied(patch, Status.NOT_NEEDED, unneeded)
        return Applied(patch, Status.PATCHED, patch.install())
    except Exception as error:  # a fairseq of an unknown version must still start: see apply_all
        why = f"this fairseq is not as expected: {type(error).__name__}: {error}"
        logger.warning("%s: %s (%s)", patch.name, patch.reason, why)
        return Applied(patch, Status.CANNOT, why)


def wrapping(function: Callable[..., Any]) -> Wrap:
    """Make what :func:`replaces` takes of a function that stands for one of fairseq.

    Args:
        function: has the keyword argument ``original``, which is bound to what it replaces.
    """

    @functools.wraps(function)
    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(*args, original=original, **kwargs)

        return replacement

    return wrap


def replaces(targets: Mapping[str, Wrap]) -> Callable[[], str]:
    """Build an ``install`` of :class:`Patch` that replaces functions, classes or modules' globals.

    Args:
        targets: place -> ``wrap``, where ``wrap(original)`` returns the replacement; of a function
            usually one that :func:`wrapping` made. A place is written ``module:attribute`` or
            ``module:Class.attribute``. The wrapper of a classmethod or staticmethod receives the
            plain function.

    Returns:
        A function that makes the replacements and returns the list of them.
    """

    def install() -> str:
        # All places are found before the first one is changed: a patch is whole or not at all.
        for put in [_replacement(place, wrap) for place, wrap in targets.items()]:
            put()
        return f"replaces {', '.join(place.replace(':', '.') for place in targets)}"

    return install


class Overlay(types.ModuleType):
    """A module with some names changed, seen only by those who hold this object.

    Note [A module of their own]
    ----------------------------
    Changing numpy or torch themselves would change what every other library in the process sees.
    Instead the global ``np`` or ``torch`` of a few fairseq modules becomes an overlay.
    """

    def __init__(self, module: types.ModuleType, **names: Any) -> None:
        super().__init__(module.__name__)
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _replacement(place: str, wrap: Wrap) -> Callable[[], None]:
    """Find a place of fairseq, and return what puts ``wrap(original)`` there, once for each wrap.

    Args:
        place: see :func:`replaces`.
        wrap: builds the replacement; should use ``functools.wraps``, so that fairseq's own
            function stays reachable as ``__wrapped__``.
    """
    module, _, path = place.partition(":")
    *outer, name = path.split(".")
    owner = functools.reduce(getattr, outer, importlib.import_module(module))
    original = inspect.getattr_static(owner, name)
    kind = type(original) if isinstance(original, (classmethod, staticmethod)) else None
    if kind is not None:
        original = original.__func__
    # A name rather than the object: a module that is imported anew makes new objects.
    wrapped_by, mine = getattr(original, _MARK, ()), f"{wrap.__module__}.{wrap.__qualname__}"
    if mine in wrapped_by:
        return lambda: None
    replacement = wrap(original)
    setattr(replacement, _MARK, (*wrapped_by, mine))
    return functools.partial(
        setattr, owner, name, replacement if kind is None else kind(replacement)
    )
