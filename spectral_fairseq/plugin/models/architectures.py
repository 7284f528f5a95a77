"""The one way in which this package registers architectures with fairseq."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any, Callable, Mapping, Type

from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import ARCH_CONFIG_REGISTRY, register_model, register_model_architecture

from spectral_fairseq.plugin.models.options import with_defaults

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
        name: of the model. It is a model and not only an architecture, because
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
