"""The one way in which this package registers with fairseq: flags as dataclasses, architectures."""

from __future__ import annotations

import dataclasses
import sys
from types import MappingProxyType
from typing import Any, Callable, Dict, Iterable, Mapping, Type

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import ARCH_CONFIG_REGISTRY, register_model, register_model_architecture

from spectral_fairseq.options import Option, flag_of


def with_options(
    config: Type[FairseqDataclass], name: str, options: Iterable[Option], doc: str
) -> Any:
    """A subclass of a configuration, with a name, a docstring and one field per option."""
    fields = [
        (
            entry.name,
            ChoiceEnum(entry.choices) if entry.choices else entry.type or type(entry.default),
            entry.field,
        )
        for entry in options
    ]
    return dataclasses.make_dataclass(name, fields, bases=(config,), namespace={"__doc__": doc})


def with_defaults(config: Type[FairseqDataclass], name: str, **defaults: Any) -> Any:
    """A subclass of ``config`` called ``name`` in which some fields have other defaults."""
    fields = []
    for key, default in defaults.items():
        original = config.__dataclass_fields__[key]
        field = dataclasses.field(default=default, metadata=original.metadata)
        fields.append((key, original.type, field))
    return dataclasses.make_dataclass(name, fields, bases=(config,))


def flags_of(config: Type[FairseqDataclass]) -> Dict[str, str]:
    """The flag of each field, for :func:`spectral_fairseq.errors.arguments_as_flags`."""
    return {field.name: flag_of(field.name) for field in dataclasses.fields(config)}


FillSizes = Callable[[Any], None]
"""One of fairseq's own architecture functions: sets the flags that were not given."""


def register(
    name: str,
    model: type,
    config: Type[FairseqDataclass],
    preset: Mapping[str, Any],
    sizes: Mapping[str, FillSizes] = MappingProxyType({}),
    *,
    legacy: bool = False,
) -> None:
    """Register a model as ``--arch name``, and with each of fairseq's sizes.

    Args:
        name: the model's name. It is a model and not only an architecture, because
            fairseq-hydra-train knows no architectures.
        model: class with ``build_model``; a subclass with the attribute ``config`` is registered.
        config: dataclass of the flags.
        preset: fields with other defaults than those of ``config``.
        sizes: suffix of an architecture's name -> what fills its sizes in. The empty suffix is the
            name itself, if the defaults of a dataclass cannot express its sizes, such as "as wide
            as the encoder".
        legacy: fairseq's own model of that kind has no dataclass and keeps its flags in a
            Namespace; this one does too.
    """
    class_name = name.title().replace("_", "")
    preset_config = with_defaults(config, f"{class_name}Config", **preset)
    members = {
        "__doc__": f"``--arch {name}``.",
        "__module__": model.__module__,
        "config": preset_config,
    }
    registered = type(class_name, (model,), members)
    setattr(sys.modules[model.__module__], class_name, registered)  # where pickle looks for it
    register_model(name, dataclass=None if legacy else preset_config)(registered)
    for suffix, fill in sizes.items():
        if suffix or legacy:
            register_model_architecture(name, name + suffix)(_complete(preset_config, fill, legacy))
        else:  # fairseq has registered this name itself, with the dataclass
            ARCH_CONFIG_REGISTRY[name] = fill


def add_flags_without_defaults(cls: Any, parser: Any) -> None:
    """A model's ``add_args``: flags that stay unset unless given.

    fairseq fills the flags that are missing from the sizes first and from the dataclass last. A
    default on the command line would hide what was not given.
    """
    gen_parser_from_dataclass(parser, cls.config(), delete_default=True)


def fill_defaults(args: Any, config: Type[FairseqDataclass]) -> None:
    """Set the flags of ``config`` that were not given, as fairseq does for models with one."""
    for field in dataclasses.fields(config):
        if field.name != "_name" and not hasattr(args, field.name):
            setattr(args, field.name, field.default)


def _complete(config: Type[FairseqDataclass], fill: FillSizes, legacy: bool) -> FillSizes:
    def fill_all(args: Any) -> None:
        fill_defaults(args, config)
        fill(args)

    return fill_all if legacy else fill
