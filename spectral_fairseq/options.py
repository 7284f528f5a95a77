"""Options declared once: from an :class:`Option` follow flag, field, check, help and documentation.

fairseq reads dataclasses, whose metadata know the help of a field and no more of what an option is.
So the declaration is an object of its own, which the metadata carry along. It is written where the
option is used: in a tuple of a table, an output head or a penalty, as

    Option("spectrum_c2", 0.0005, "c2 of an SVD table's exponential prior", argument="c2")

or as the field of a dataclass, which gives it its name and its type:

    @dataclass
    class SearchOptions:
        tokens: Optional[int] = option(None, "search the first N tokens", metavar="N", at_least=1)

    add_flags(parser, SearchOptions)                     # --tokens N
    options = from_arguments(SearchOptions, arguments)   # what was given; the default otherwise
    check_ranges(options)

A field that holds another such dataclass, or None, is a group: ``cache: Optional[CacheOptions]``
gives ``--cache`` and one flag ``--cache-...`` for each field of ``CacheOptions``. One that always
holds another is a :func:`part`, whose flags stand among the others. Nothing here imports torch or
fairseq, so that a command line can be parsed without them.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from dataclasses import dataclass, is_dataclass
from types import SimpleNamespace
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Type,
    TypeVar,
)

from spectral_fairseq.errors import arguments_as_flags, check_choice, check_range, idle_flag

T = TypeVar("T")
_KEY = "option"


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: the field of the configuration, such as ``cosreg_weight``.
        default: the value if it is not given; its type is that of the option.
        help: its line in ``--help`` and in the documentation, readable by itself.
        type: if it is not that of the default.
        choices: the values allowed, if they are few texts.
        at_least: the least value allowed. With any of these bounds, a number has to be finite.
        above: the value must be larger.
        at_most: the largest value allowed.
        below: the value must be smaller.
        parse: turns the value given into the value used. Errors that it raises may call the value
            ```value```, which is replaced by the flag.
        argument: of the constructor of a table or a head that takes it.
        flag_name: the flag's name, where it is not the field's.
        alias: another flag for the same.
        metavar: stands for the value in ``--help``.
        positional: whether it is given by its place, without a flag.
        nargs: how many values there may be, as for argparse.
        required: whether it has to be given.
        exclusive_group: a name; of the options that share it at most one may be given.
        title: of a group or a part, its heading in ``--help``.
        switches_group_on: of a group, whether any of its flags switches it on.
        rare: whether only ``--help-all`` shows it.
        needs: what it has no effect without; one of them is enough. A name is that of another
            option, anything else is said of the model in the words of the warning.
    """

    name: str
    default: Any
    help: str
    type: Any = None
    choices: Sequence[str] = ()
    at_least: Optional[float] = None
    above: Optional[float] = None
    at_most: Optional[float] = None
    below: Optional[float] = None
    parse: Optional[Callable[[Any], Any]] = None
    argument: str = ""
    flag_name: str = ""
    alias: str = ""
    metavar: Optional[str] = None
    positional: bool = False
    nargs: Optional[str] = None
    required: bool = False
    exclusive_group: str = ""
    title: str = ""
    switches_group_on: bool = True
    rare: bool = False
    needs: Tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The option as users type it, such as ``--cosreg-weight``."""
        return "--" + (self.flag_name or self.name).replace("_", "-")

    @property
    def field(self) -> Any:
        """The dataclass field, with the metadata that fairseq reads."""
        metadata = {"help": self.help, _KEY: self}
        if self.alias:
            metadata["argparse_alias"] = self.alias
        return dataclasses.field(default=self.default, metadata=metadata)

    def check(self, value: Any) -> None:
        """Refuse a value outside the range; None is in every one.

        Raises:
            ConfigurationError: the message calls it ```value```.
        """
        check_range(
            "`value`",
            value,
            at_least=self.at_least,
            above=self.above,
            at_most=self.at_most,
            below=self.below,
            whole=int in (self.type or type(self.default), *typing.get_args(self.type)),
            optional=True,
        )

    def parsed(self, value: Any) -> Any:
        """The value used for a value given.

        Raises:
            ConfigurationError: it is outside the range, or ``parse`` refuses it.
        """
        if self.choices:
            return str(value)  # fairseq makes it a member of an enumeration
        self.check(value)
        return value if self.parse is None else self.parse(value)

    def as_argument(self, value: Any) -> Any:
        """:meth:`parsed` for a value of the ``argument``, whose name errors have."""
        with arguments_as_flags(value=f"`{self.argument}`"):
            return self.parsed(value)

    def read(self, cfg: Any) -> Any:
        """The value in a configuration, checked and parsed as by :meth:`parsed`."""
        with arguments_as_flags(value=self.flag):
            return self.parsed(getattr(cfg, self.name))


def option(default: Any, help: str, **more: Any) -> Any:
    """A dataclass field that is an option.

    Args:
        default: its value where it is not given.
        help: its line in ``--help``.
        more: further attributes of :class:`Option`.
    """
    return Option("", default, help, **more).field


# Of fairseq's commands and of evaluate-lm; functional/float32_products.py does it.
FLOAT32_PRODUCTS = Option(
    "float32_products",
    "auto",
    "how a CPU multiplies float32 matrices: as torch comes, through oneDNN (fast), or through "
    "oneDNN where it is known to be faster and equally precise (auto); on a GPU, fast allows TF32",
    choices=("auto", "fast", "torch"),
)


def part(options: Type[Any], title: str = "", help: str = "") -> Any:
    """A dataclass field that holds further options, with flags of their own names.

    Args:
        options: the dataclass.
        title: their heading in ``--help``; they stand among the others if there is none.
        help: the line below it.
    """
    declared = Option("", None, help, title=title)
    return dataclasses.field(default_factory=options, metadata={_KEY: declared})


def weight_option(name: str, help: str) -> Option:
    """The option of a weight that is 0, which turns its penalty off, unless given."""
    return Option(name, 0.0, help, at_least=0)


# Options in tuples: of tables, heads, penalties and likelihoods.


def read_options(options: Iterable[Option], cfg: Any) -> SimpleNamespace:
    """The checked values of options in a configuration, by the names of their fields.

    Raises:
        ConfigurationError: a value outside its option's range.
    """
    return SimpleNamespace(**{entry.name: entry.read(cfg) for entry in options})


def idle_flags(
    options: Iterable[Option], values: Any, defaults: Any, facts: Mapping[str, bool]
) -> Dict[str, str]:
    """Flags that were given although nothing that they need is there -> what they need.

    Args:
        options: to look at.
        values: their checked values, and those of the options that they need, by the names of
            their fields.
        defaults: likewise the values of options that are not given.
        facts: what an option may need beside other options, and whether it is there.
    """
    flags = {entry.name: entry.flag for entry in options}
    return {
        entry.flag: " or ".join(flags.get(need, need) for need in entry.needs)
        for entry in options
        if entry.needs
        and str(getattr(values, entry.name)) != str(getattr(defaults, entry.name))
        and not any(getattr(values, need) if need in flags else facts[need] for need in entry.needs)
    }


def flags_by_argument(options: Iterable[Option]) -> Dict[str, str]:
    """The flag of each argument, for :func:`spectral_fairseq.errors.arguments_as_flags`."""
    return {entry.argument: entry.flag for entry in options}


def arguments(options: Iterable[Option], cfg: Any) -> Dict[str, Any]:
    """The keyword arguments that a configuration gives for options of a table or a head.

    Raises:
        ConfigurationError: a value outside its option's range; the message names the argument.
    """
    return {entry.argument: entry.as_argument(getattr(cfg, entry.name)) for entry in options}


# Options as fields of a dataclass: of subcommands and of language models' evaluation.


class _Field(NamedTuple):
    name: str
    kind: Any  # int, float, str, bool, a dataclass, or a tuple type
    default: Any
    declared: Option
    flag: str  # as typed, with prefix and dashes
    dest: str  # in the parsed arguments
    is_group: bool  # a dataclass or None
    is_part: bool  # a dataclass always


def _fields(options: Type[Any], prefix: str) -> Iterator[_Field]:
    kinds = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        if _KEY not in field.metadata:  # of fairseq
            continue
        declared: Option = field.metadata[_KEY]
        kind = kinds[field.name]
        optional = type(None) in typing.get_args(kind)
        if optional:
            (kind,) = [part for part in typing.get_args(kind) if part is not type(None)]
        flag = "--" + (prefix + (declared.flag_name or field.name)).replace("_", "-")
        groups = (optional and is_dataclass(kind), not optional and is_dataclass(kind))
        yield _Field(field.name, kind, field.default, declared, flag, prefix + field.name, *groups)


def add_flags(parser: Any, options: Type[Any], prefix: str = "", with_rare: bool = True) -> None:
    """Add a flag for each field.

    Args:
        parser: an argparse parser or group of one.
        options: the dataclass.
        prefix: of the flags' names, such as ``tune_``.
        with_rare: whether ``--help`` shows options that are rarely needed.
    """
    exclusive: Dict[str, Any] = {}
    for field in _fields(options, prefix):
        declared = field.declared
        if field.is_part:
            title = (declared.title, declared.help or None)
            place = parser.add_argument_group(*title) if declared.title else parser
            add_flags(place, field.kind, with_rare=with_rare)
            continue
        if field.is_group:
            group = parser.add_argument_group(declared.title)
            group.add_argument(
                field.flag, dest=field.dest, action="store_true", default=None, help=declared.help
            )
            add_flags(group, field.kind, f"{field.dest}_", with_rare)
            continue
        hidden = declared.rare and not with_rare
        settings: Dict[str, Any] = {
            "default": None,
            "help": argparse.SUPPRESS if hidden else _help(field),
        }
        if field.kind is bool:
            settings["action"] = "store_false" if field.default else "store_true"
        else:
            settings.update(metavar=declared.metavar, **_reading(field.kind))
            if declared.choices:
                settings["choices"] = tuple(declared.choices)
        if declared.nargs:
            settings["nargs"] = declared.nargs
        if declared.positional:
            parser.add_argument(field.dest, **settings)
            continue
        if declared.exclusive_group and declared.exclusive_group not in exclusive:
            exclusive[declared.exclusive_group] = parser.add_mutually_exclusive_group()
        flags = [field.flag, declared.alias] if declared.alias else [field.flag]
        exclusive.get(declared.exclusive_group, parser).add_argument(
            *flags, dest=field.dest, required=declared.required, **settings
        )


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


def _help(field: _Field) -> str:
    text, default = field.declared.help, field.default
    shown = not isinstance(default, bool) and default not in (None, "", ())
    if shown and "(default:" not in text and not field.declared.required:
        text += f" (default: {default})"
    return text.replace("%", "%%")  # argparse fills in what follows a single one


def from_arguments(options: Type[T], arguments: argparse.Namespace, prefix: str = "") -> T:
    """The options that a command line gives.

    Raises:
        ConfigurationError: flags of a group that has to be switched on and is not.
    """
    values: Dict[str, Any] = {}
    for field in _fields(options, prefix):
        if field.is_part:
            values[field.name] = from_arguments(field.kind, arguments)
            continue
        value = getattr(arguments, field.dest)
        if field.is_group:
            prefix_of_group = f"{field.dest}_"
            given = [
                part.flag
                for part in _fields(field.kind, prefix_of_group)
                if getattr(arguments, part.dest) is not None
            ]
            if given and not value and not field.declared.switches_group_on:
                raise idle_flag(" and ".join(given), field.flag)
            if value or given:
                values[field.name] = from_arguments(field.kind, arguments, prefix_of_group)
        elif value is not None:
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return options(**values)


def check_ranges(options: Any, prefix: str = "", config: Optional[Type[Any]] = None) -> None:
    """Refuse values outside the declared ranges and choices, in groups too.

    Args:
        options: the values.
        prefix: of the flags' names.
        config: the dataclass that declares them, if ``options`` is a namespace.

    Raises:
        ConfigurationError: the first such value.
    """
    for field in _fields(config or type(options), prefix):
        value = getattr(options, field.name)
        if value is None:
            continue
        if field.is_group or field.is_part:
            check_ranges(value, f"{field.dest}_" if field.is_group else "")
            continue
        with arguments_as_flags(value=field.flag):
            for choice in value if isinstance(value, tuple) else [value]:
                if field.declared.choices:
                    check_choice("`value`", choice, field.declared.choices)
            dataclasses.replace(field.declared, type=field.kind).check(value)
