"""Options declared once: from an :class:`Option` follow flag, field, check, help and documentation.

fairseq reads dataclasses, whose metadata know the help of a field and no more of what an option is.
So the declaration is an object of its own, which the metadata carry along. It is written where the
option is used: in a tuple of a table, an output head or a penalty, as

    Option("spectrum_c2", 0.0005, "c2 of an SVD table's exponential prior", argument="c2")

or as the field of a dataclass of fairseq, which gives it its name and its type:

    @dataclass
    class SearchConfig(FairseqDataclass):
        tokens: Optional[int] = option(None, "search the first N tokens", at_least=1)

    check_ranges(cfg, SearchConfig)

The subcommands of ``spectral-fairseq`` have argparse. Nothing here imports torch or fairseq.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Type,
)

from spectral_fairseq.errors import arguments_as_flags, check_range

_KEY = "option"


def flag_of(name: str) -> str:
    """The flag of a field or an argument, such as ``--cosreg-weight`` of ``cosreg_weight``."""
    return "--" + name.replace("_", "-")


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
        alias: another flag for the same.
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
    alias: str = ""
    needs: Tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The option as users type it, such as ``--cosreg-weight``."""
        return flag_of(self.name)

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
    "how a CPU multiplies float32 matrices: as torch comes (torch), through oneDNN (fast), or "
    "through oneDNN where it is known to be faster and equally precise (auto); on a GPU, fast "
    "allows TF32",
    choices=("auto", "fast", "torch"),
)


def weight_option(name: str, help: str) -> Option:
    """The option of a weight that is 0, which turns its penalty off, unless given."""
    return Option(name, 0.0, help, at_least=0)


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


def check_ranges(values: Any, config: Type[Any]) -> None:
    """Refuse values outside the declared ranges.

    Args:
        values: by the names of the fields.
        config: the dataclass whose fields are options; those of fairseq are passed over.

    Raises:
        ConfigurationError: the first such value.
    """
    kinds = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        declared: Optional[Option] = field.metadata.get(_KEY)
        if declared is not None:
            with arguments_as_flags(value=flag_of(field.name)):
                value = getattr(values, field.name)
                dataclasses.replace(declared, type=kinds[field.name]).check(value)
