"""Options declared once: a dataclass whose fields give flags and range checks.

    @dataclass
    class SearchOptions:
        tokens: Optional[int] = option(None, "search the first N tokens", metavar="N", at_least=1)

    add_flags(parser, SearchOptions)                     # --tokens N
    options = from_arguments(SearchOptions, arguments)   # what was given; the default otherwise
    check_ranges(options)

A field that holds another such dataclass, or None, is a group: ``cache: Optional[CacheOptions]``
gives ``--cache`` and one flag ``--cache-...`` for each field of ``CacheOptions``. Nothing here
imports torch, so that a command line can be parsed without it.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from dataclasses import dataclass, is_dataclass
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Type, TypeVar

from spectral_fairseq.errors import ConfigurationError

T = TypeVar("T")
_KEY = "option"


@dataclass(frozen=True)
class Declaration:
    """What is known of one option beside its type and default.

    Attributes:
        help: its line in ``--help``.
        flag: name of the flag without dashes, where it is not the field's.
        metavar: stands for the value in ``--help``.
        choices: the values allowed; all where empty.
        at_least: the least value allowed.
        below: the value must be smaller.
        title: of a group, its heading in ``--help``.
        implied: of a group, whether any of its flags switches it on.
    """

    help: str
    flag: Optional[str] = None
    metavar: Optional[str] = None
    choices: Sequence[str] = ()
    at_least: Optional[int] = None
    below: Optional[int] = None
    title: str = ""
    implied: bool = True


def option(default: Any, help: str, **more: Any) -> Any:
    """A dataclass field that is an option.

    Args:
        default: its value where it is not given.
        help: its line in ``--help``.
        more: further attributes of :class:`Declaration`.
    """
    return dataclasses.field(default=default, metadata={_KEY: Declaration(help, **more)})


class _Field(NamedTuple):
    name: str
    kind: Any  # int, float, str, bool, a dataclass, or a tuple type
    default: Any
    declared: Declaration
    flag: str  # as typed, with prefix and dashes
    dest: str  # in the parsed arguments


def _fields(options: Type[Any], prefix: str) -> Iterator[_Field]:
    kinds = typing.get_type_hints(options)
    for one in dataclasses.fields(options):
        declared: Declaration = one.metadata[_KEY]
        kind = kinds[one.name]
        if type(None) in typing.get_args(kind):
            (kind,) = [part for part in typing.get_args(kind) if part is not type(None)]
        flag = "--" + (prefix + (declared.flag or one.name)).replace("_", "-")
        yield _Field(one.name, kind, one.default, declared, flag, prefix + one.name)


def add_flags(parser: Any, options: Type[Any], prefix: str = "") -> None:
    """Add a flag for each field.

    Args:
        parser: an argparse parser or group of one.
        options: the dataclass.
        prefix: of the flags' names, such as ``tune_``.
    """
    for one in _fields(options, prefix):
        declared = one.declared
        if is_dataclass(one.kind):
            group = parser.add_argument_group(declared.title)
            group.add_argument(
                one.flag, dest=one.dest, action="store_true", default=None, help=declared.help
            )
            add_flags(group, typing.cast(Type[Any], one.kind), f"{one.dest}_")
            continue
        settings: Dict[str, Any] = {"dest": one.dest, "default": None, "help": _help(one)}
        if one.kind is bool:
            settings["action"] = "store_true"
        else:
            settings.update(metavar=declared.metavar, **_reading(one.kind))
            if declared.choices:
                settings["choices"] = tuple(declared.choices)
        parser.add_argument(one.flag, **settings)


def _reading(kind: Any) -> Dict[str, Any]:
    if typing.get_origin(kind) is not tuple:
        return {"type": kind}
    # Words are separated by blanks, since they may contain commas; numbers by commas.
    return {"nargs": "+"} if typing.get_args(kind)[0] is str else {"type": numbers}


def numbers(text: str) -> Tuple[float, ...]:
    """The numbers in ``0.1,0.2``.

    Raises:
        ArgumentTypeError: something else.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers separated by commas, found {text!r}"
        ) from None


def _help(one: _Field) -> str:
    unset = one.default is None or one.default is False or one.default == ()
    text = one.declared.help if unset else f"{one.declared.help} (default: {one.default})"
    return text.replace("%", "%%")  # argparse fills in what follows a single one


def from_arguments(options: Type[T], arguments: argparse.Namespace, prefix: str = "") -> T:
    """The options that a command line gives.

    Args:
        options: the dataclass.
        arguments: parsed by a parser that :func:`add_flags` extended.
        prefix: the one given there.

    Raises:
        ConfigurationError: flags of a group that has to be switched on and is not.
    """
    given: Dict[str, Any] = {}
    for one in _fields(options, prefix):
        value = getattr(arguments, one.dest)
        if is_dataclass(one.kind):
            group = typing.cast(Type[Any], one.kind)
            parts = _given(group, arguments, f"{one.dest}_")
            if parts and not value and not one.declared.implied:
                raise ConfigurationError(
                    f"{one.flag} together with {' and '.join(parts)}",
                    "no such flag",
                    f"Add {one.flag}.",
                )
            if value or parts:
                given[one.name] = from_arguments(group, arguments, f"{one.dest}_")
        elif value is not None:
            given[one.name] = tuple(value) if isinstance(value, list) else value
    return options(**given)


def _given(options: Type[Any], arguments: argparse.Namespace, prefix: str) -> List[str]:
    return [
        one.flag for one in _fields(options, prefix) if getattr(arguments, one.dest) is not None
    ]


def check_ranges(options: Any, prefix: str = "") -> None:
    """Refuse values outside the declared ranges, in groups too.

    Raises:
        ConfigurationError: the first such value.
    """
    for one in _fields(type(options), prefix):
        value, declared = getattr(options, one.name), one.declared
        if value is None:
            continue
        if is_dataclass(one.kind):
            check_ranges(value, f"{one.dest}_")
        if declared.at_least is not None and value < declared.at_least:
            raise ConfigurationError(
                f"{one.flag} to be at least {declared.at_least}", str(value), "Correct it."
            )
        if declared.below is not None and value >= declared.below:
            raise ConfigurationError(
                f"{one.flag} to be below {declared.below}", str(value), "Correct it."
            )
