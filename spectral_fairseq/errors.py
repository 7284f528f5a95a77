"""Errors that a user can cause, and the checks that several packages make.

Each error states what was expected, what was found and what to do.

Note [Arguments and flags]
--------------------------
The library packages (``functional``, ``embeddings``, ``heads``, ``lm``) know no command line. Their
messages name an argument in backquotes: "expected `epsilon` to be a finite number >= 0". The code
that read the argument from a flag wraps the call in :func:`arguments_as_flags`, so that the person
at the command line reads "expected --adversarial-epsilon to be a finite number >= 0".
"""

from __future__ import annotations

import math
import operator
import re
import textwrap
from contextlib import contextmanager
from typing import Any, Iterable, Iterator, Mapping, Optional, Sequence, Type


class SpectralFairseqError(Exception):
    """Base class of every error that this package raises on purpose.

    Args:
        expected: what would have been right. Arguments are named in backquotes.
        found: what was there instead.
        remedy: what the user should do, as an imperative sentence.
    """

    def __init__(self, expected: str, found: str, remedy: str) -> None:
        self.expected = expected
        self.found = found
        self.remedy = remedy
        # Names of files and entries of checkpoints are in it, which may hold escape sequences and
        # ends of lines.
        super().__init__(printable(f"expected {expected}; found {found}. {remedy}", keep=""))

    def __reduce__(self) -> tuple:
        # BaseException pickles self.args, which is only the formatted message: a worker process
        # could not send such an error back to its parent.
        return type(self), (self.expected, self.found, self.remedy)


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph in lines that fit a terminal of 80 columns; no word or flag is broken."""
    return textwrap.fill(
        text,
        79,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def printable(text: str, keep: str = "\n") -> str:
    """``text`` with backslash escapes in place of control characters, which a terminal obeys.

    Args:
        text: from a file, a file's name or the command line.
        keep: control characters that stay.
    """
    return "".join(
        character
        if character.isprintable() or character in keep
        else character.encode("unicode_escape").decode()
        for character in text
    )


def plainly(value: Any) -> str:
    """``value`` as Python spells it, numbers of numpy and torch as those of Python."""
    if isinstance(value, tuple):
        return f"({', '.join(map(plainly, value))}{',' * (len(value) == 1)})"
    is_number = hasattr(value, "item") and getattr(value, "ndim", None) == 0
    return repr(value.item() if is_number else value)


def listed(items: Sequence[Any], most: int = 4, separator: str = ", ") -> str:
    """The first of several items and dots for the others; ``none`` where there are none."""
    spelled = [plainly(item) if isinstance(item, tuple) else str(item) for item in items[:most]]
    shown = [*spelled, *(["..."] if len(items) > most else [])]
    return separator.join(shown) or "none"


def first_line(error: BaseException) -> str:
    """The kind of an error and the beginning of its message."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


class ConfigurationError(SpectralFairseqError, ValueError):
    """An argument, or a combination of arguments, that cannot be used."""


class UnsupportedError(ConfigurationError):
    """Features that do not work together; ``refusals.py`` has the table of them."""


class CheckpointError(SpectralFairseqError, ValueError):
    """A checkpoint that is missing, damaged, unsafe to load, or of another kind than needed."""


class DataError(SpectralFairseqError, ValueError):
    """A data folder, dictionary or table whose content cannot be used."""


class MissingDataError(DataError, FileNotFoundError):
    """A data folder, dictionary or split that does not exist; also a ``FileNotFoundError``."""


# Remedies that several errors give.
DIVERGED = (
    "Training diverged, rows were never initialised, or the file is damaged: take an earlier "
    "checkpoint, and lower the learning rate if training diverges again."
)
NEW_STATE = (
    "To train on with the weights alone, start with a new state of the optimiser (fairseq: "
    "--reset-optimizer)."
)
OTHER_FOLDER = (
    "To take nothing from that checkpoint, give another --save-dir: fairseq goes on from the "
    "checkpoint_last.pt that it finds there."
)
CHOOSE = "Choose one with --table NAME."
COPY_AGAIN = "It is truncated, damaged or of another format: copy it again."
SAVE_AGAIN = (
    "Do not use it unless you know who made it; if it is your own, save it again, tensors and "
    "plain settings alone."
)


class _WithUsualRemedy(SpectralFairseqError):
    """Base class of the errors whose remedy is the usual one unless another is given."""

    usual_remedy: str

    def __init__(self, expected: str, found: str, remedy: str = "") -> None:
        super().__init__(expected, found, remedy or self.usual_remedy)


class DamagedError(_WithUsualRemedy, CheckpointError, DataError):
    """A file that is not what its name or its first bytes say."""

    usual_remedy = COPY_AGAIN


class UntrustedError(_WithUsualRemedy, CheckpointError):
    """A file that could run code or fill the memory, or of which programs read different parts."""

    usual_remedy = SAVE_AGAIN


class NotFairseqError(_WithUsualRemedy, CheckpointError):
    """A checkpoint with other content than fairseq saves."""

    usual_remedy = "Give a checkpoint saved by fairseq-train."


class PartsError(_WithUsualRemedy, CheckpointError):
    """Files of one model that are not all there, or do not belong together."""

    usual_remedy = "Copy the whole folder again; if one file is a whole model, move it away."


class ForbiddenError(_WithUsualRemedy, CheckpointError):
    """A file or folder that the system does not let be read."""

    usual_remedy = "Check its name and permissions."


class NoEquivalentError(_WithUsualRemedy, UnsupportedError):
    """A model that another format cannot represent."""

    usual_remedy = "Try another --to, or keep this checkpoint and use fairseq with --user-dir."


class OutputError(SpectralFairseqError, OSError):
    """A file that could not be written, for example on a full disk; also an ``OSError``."""


def check_range(
    what: str,
    value: Any,
    *,
    at_least: Optional[float] = None,
    above: Optional[float] = None,
    at_most: Optional[float] = None,
    below: Optional[float] = None,
    whole: bool = False,
    optional: bool = False,
    remedy: str = "Correct it.",
) -> None:
    """Refuse a number outside its range; infinity and NaN are in none.

    Args:
        what: the argument, in backquotes.
        value: given for it.
        at_least: the least value, if there is one.
        above: a bound below all values.
        at_most: the largest value.
        below: a bound above all values.
        whole: whether it has to be a whole number.
        optional: whether it may be left out, as ``None``.
        remedy: more than that the value has to be corrected.

    Raises:
        ConfigurationError: it is outside.
    """
    bounds = [
        (sign, holds, bound)
        for sign, holds, bound in (
            (">=", operator.ge, at_least),
            (">", operator.gt, above),
            ("<=", operator.le, at_most),
            ("<", operator.lt, below),
        )
        if bound is not None
    ]
    if not bounds or (optional and value is None):
        return
    try:
        right = math.isfinite(value)  # NaN is on no side of a bound
    except (TypeError, OverflowError):  # no number; a whole one that no float can hold
        right = False
    right = right and all(holds(value, bound) for _, holds, bound in bounds)
    if not right or (whole and value != int(value)):
        wanted = " and ".join(f"{sign} {bound:g}" for sign, _, bound in bounds)
        kind = "whole" if whole else "finite"
        raise ConfigurationError(f"{what} to be a {kind} number {wanted}", plainly(value), remedy)


def check_choice(what: str, value: Any, choices: Iterable[str]) -> None:
    """Refuse a name that is none of the known ones.

    Raises:
        ConfigurationError: it is none of ``choices``.
    """
    if value not in choices:
        names = ", ".join(choices)
        wanted = f"{what} to be one of {names}"
        raise ConfigurationError(wanted, plainly(value), "Choose one of them.")


def check_shape(
    what: str,
    tensor: Any,
    shape: Sequence[int],
    remedy: str,
    error: Type[SpectralFairseqError] = ConfigurationError,
) -> None:
    """Refuse a tensor of another shape.

    Raises:
        ConfigurationError: it has another; or an error of the class that is given.
    """
    found, wanted = tuple(tensor.shape), tuple(shape)
    if found != wanted:
        raise error(f"{what} of shape {plainly(wanted)}", f"shape {plainly(found)}", remedy)


def check_enough(
    count: int,
    least: int,
    what: str,
    remedy: str,
    error: Type[SpectralFairseqError] = DataError,
) -> None:
    """Refuse too few of something.

    Args:
        count: how many there are.
        least: how many are needed.
        what: they are and what they are needed for, in words that follow the number.
        remedy: what the user should do.
        error: the class that is raised.

    Raises:
        DataError: there are fewer; or an error of the class that is given.
    """
    if count < least:
        number = {1: "one", 2: "two"}.get(least, f"{least:,}")
        raise error(f"at least {number} {what}", f"{count:,}" if count else "none", remedy)


def check_count(
    count: int,
    wanted: int,
    what: str,
    remedy: str,
    error: Type[SpectralFairseqError] = ConfigurationError,
) -> None:
    """Refuse more or fewer of something than there have to be; see :func:`check_enough`."""
    if count != wanted:
        raise error(f"{wanted:,} {what}", f"{count:,}", remedy)


def check_type(
    value: Any,
    kinds: Any,
    what: str,
    remedy: str,
    error: Type[SpectralFairseqError] = ConfigurationError,
) -> None:
    """Refuse an object of another type.

    Args:
        value: the object.
        kinds: a type, or a tuple of types.
        what: it has to be, for the message.
        remedy: what the user should do.
        error: the class that is raised.

    Raises:
        ConfigurationError: it is of another type; or an error of the class that is given.
    """
    if not isinstance(value, kinds):
        raise error(what, f"an object of type {type(value).__name__}", remedy)


def check_alike(what: str, values: Mapping[str, Any], remedy: str) -> None:
    """Refuse values of several flags that have to be one.

    Raises:
        ConfigurationError: they differ.
    """
    if len(set(values.values())) > 1:
        found = " and ".join(f"{flag} {value}" for flag, value in values.items())
        raise ConfigurationError(what, found, remedy)


def misspelt(wanted: str, text: Any) -> ConfigurationError:
    """The error for a text that does not spell what is wanted."""
    return ConfigurationError(wanted, plainly(text), "Correct it.")


def idle_flag(flag: str, needed: str) -> ConfigurationError:
    """The error for a flag that does nothing without another one."""
    remedy = f"Add {needed}, or remove {flag}."
    return ConfigurationError(f"{needed} together with {flag}", "none", remedy)


def clashing_flags(*flags: str) -> ConfigurationError:
    """The error for flags of which one alone may be given."""
    return ConfigurationError(f"one of {' and '.join(flags)}", "both", "Drop one of them.")


def missing_package(package: str, use: str) -> ConfigurationError:
    """The error for a package that is not installed, and that no extra brings."""
    wanted, remedy = f"the package {package}, {use}", f"Run pip install {package}."
    return ConfigurationError(wanted, "no such package", remedy)


@contextmanager
def needs_extra(extra: str, purpose: str, instead: str = "") -> Iterator[None]:
    """Say which extra of this package brings what an import in the block does not find.

    Args:
        extra: its name in ``setup.py``.
        purpose: what it is needed for, such as "to read safetensors".
        instead: what else the user may do, as the rest of a sentence.

    Raises:
        ConfigurationError: instead of an ``ImportError``.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"the packages of the extra `{extra}` to be installed, {purpose}",
            first_line(error),
            f'Run pip install ".[{extra}]" in a clone of this package{instead}.',
        ) from error


@contextmanager
def arguments_as_flags(**flags: str) -> Iterator[None]:
    """Name flags instead of arguments in the errors of this package that leave the block.

    Can also decorate a function. Blocks nest: an argument that the inner block does not know is
    left to the outer one.

    Args:
        flags: the flag of each argument, such as ``epsilon="--adversarial-epsilon"``.

    Raises:
        SpectralFairseqError: the error raised inside, of the same class, with its message reworded.
    """
    try:
        yield
    except SpectralFairseqError as error:
        parts = [
            re.sub(r"`(\w+)`", lambda name: flags.get(name[1], name[0]), part)
            for part in (error.expected, error.found, error.remedy)
        ]
        raise type(error)(*parts).with_traceback(error.__traceback__) from error.__cause__
