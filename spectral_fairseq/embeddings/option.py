"""Options that users choose, declared beside the table or output head that takes them."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, NamedTuple, Optional, Sequence


class Option(NamedTuple):
    """An argument of a constructor that is also a field of an architecture's configuration.

    Attributes:
        argument: the name of the argument.
        field: the name of the field. Its flag is ``--field`` with dashes for underscores.
        default: the field's default.
        help: what the flag means, readable by itself.
        choices: the values that are allowed, if they are few texts.
        type: the type of the field; that of the default if not given.
        parse: turns the field's value into the argument; a choice becomes a text.
    """

    argument: str
    field: str
    default: Any
    help: str
    choices: Sequence[str] = ()
    type: Any = None
    parse: Optional[Callable[[Any], Any]] = None

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return "--" + self.field.replace("_", "-")


def flags_by_argument(options: Iterable[Option]) -> Dict[str, str]:
    """The flag of each argument, for :func:`spectral_fairseq.errors.arguments_as_flags`."""
    return {option.argument: option.flag for option in options}


def arguments(options: Iterable[Option], config: Any) -> Dict[str, Any]:
    """The keyword arguments that a configuration gives for ``options``.

    Args:
        options: declared by a table or a head.
        config: object whose attributes are the options' fields.
    """
    return {option.argument: _read(option, getattr(config, option.field)) for option in options}


def _read(option: Option, value: Any) -> Any:
    if option.choices:
        return str(value)
    return value if option.parse is None else option.parse(value)
