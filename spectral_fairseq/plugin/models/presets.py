"""Named architectures: how flags that were not given receive a preset's sizes."""

from __future__ import annotations

from typing import Any, Callable, Dict

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import ARCH_CONFIG_REGISTRY, register_model_architecture


def add_flags_without_defaults(cls: Any, parser: Any) -> None:
    """A model's ``add_args``: flags that stay unset unless given.

    fairseq fills the flags that are missing from the preset first and from the dataclass last; a
    default on the command line would hide what was not given.
    """
    gen_parser_from_dataclass(parser, cls.__dict__["__dataclass"](), delete_default=True)


def register_presets(model: str, sizes: Dict[str, Callable[[Any], None]]) -> None:
    """Register ``model`` + each suffix as an ``--arch``.

    Args:
        model: a registered model with a dataclass.
        sizes: suffix of the name -> function that fills the flags not given. The empty suffix is
            the model's own name, which fairseq registers by itself with the dataclass defaults;
            those cannot express "as wide as the encoder".
    """
    for suffix, fill in sizes.items():
        if suffix:
            register_model_architecture(model, model + suffix)(fill)
        else:
            ARCH_CONFIG_REGISTRY[model] = fill
