"""One declaration for each command-line flag, from which fairseq's dataclasses are made."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field, make_dataclass
from types import SimpleNamespace
from typing import Any, Callable, Iterable, List, Type

from fairseq.dataclass import FairseqDataclass

from spectral_fairseq.errors import ConfigurationError, arguments_as_flags


def unchecked(value: Any) -> Any:
    """``value`` itself."""
    return value


@dataclass(frozen=True)
class Flag:
    """A flag with its default, its help and its check.

    Args:
        name: the field of fairseq's configuration, such as ``cosreg_weight``.
        default: the value if the flag is not given; its type is the type of the flag.
        help: the flag's line in the documentation.
        parse: turns the value given into the value used. Errors that it raises may call the value
            ```value```, which is replaced by the flag.
        type: of the field, if it is not that of the default.
    """

    name: str
    default: Any
    help: str
    parse: Callable[[Any], Any] = unchecked
    type: Any = None

    @property
    def option(self) -> str:
        """The flag as users type it, such as ``--cosreg-weight``."""
        return "--" + self.name.replace("_", "-")

    def read(self, cfg: Any) -> Any:
        """The checked value in a configuration.

        Raises:
            ConfigurationError: ``parse`` refused the value.
        """
        with arguments_as_flags(value=self.option):
            return self.parse(getattr(cfg, self.name))


def retired(name: str, default: Any, why: str) -> Flag:
    """A flag that is gone: hidden, harmless at what was its default, refused with any other value.

    Args:
        name: its field in saved settings.
        default: the value with which it did nothing.
        why: it is gone, as the end of a sentence.
    """

    def parse(value: Any) -> Any:
        if value != default:
            raise ConfigurationError(
                "`value` to be absent, since it was removed", repr(value), f"Drop it: {why}."
            )
        return value

    return Flag(name, default, argparse.SUPPRESS, parse)


def read_flags(flags: Iterable[Flag], cfg: Any) -> SimpleNamespace:
    """The checked values of ``flags`` in a configuration, by the names of their fields.

    Raises:
        ConfigurationError: a value outside its flag's range.
    """
    return SimpleNamespace(**{flag.name: flag.read(cfg) for flag in flags})


def given(flags: Iterable[Flag], options: Any) -> List[str]:
    """The options, as users type them, of those ``flags`` whose values differ from the defaults.

    Args:
        flags: to look at.
        options: their checked values, by the names of their fields.
    """
    # A choice is compared by its text: fairseq makes it a member of an enumeration.
    return [
        flag.option
        for flag in flags
        if str(getattr(options, flag.name)) != str(flag.parse(flag.default))
    ]


def with_flags(config: Type[FairseqDataclass], name: str, flags: Iterable[Flag], doc: str) -> Any:
    """A subclass of a configuration that has a field for each flag.

    Args:
        config: the dataclass to extend.
        name: the name of the new class.
        flags: become fields in this order.
        doc: docstring of the new class.
    """
    fields = [
        (
            flag.name,
            flag.type or type(flag.default),
            field(default=flag.default, metadata={"help": flag.help}),
        )
        for flag in flags
    ]
    return make_dataclass(name, fields, bases=(config,), namespace={"__doc__": doc})


def checked(expected: str, holds: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """A ``parse`` of :class:`Flag` that returns the values for which ``holds`` and refuses others.

    Args:
        expected: how the error goes on behind the flag's name, such as "to be a finite number".
        holds: false for NaN too.
    """

    def parse(value: Any) -> Any:
        if not holds(value):
            raise ConfigurationError(f"`value` {expected}", repr(value), "Correct it.")
        return value

    return parse


finite_nonnegative = checked("to be a finite number >= 0", lambda value: 0 <= value < math.inf)


def weight_flag(name: str, help: str) -> Flag:
    """The flag of a weight that is 0, which turns its penalty off, unless given."""
    return Flag(name, 0.0, help, finite_nonnegative)
