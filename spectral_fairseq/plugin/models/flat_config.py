"""fairseq's nested Transformer configuration as one flat dataclass.

A subclass of the nested configuration fails with one of the supported versions of fairseq and
silently ignores ``--encoder-layers`` with another. An argparse-style architecture loses its own
flags under hydra and writes ``argparse.Namespace`` objects into checkpoints. A flat dataclass with
the fields of the installed fairseq has none of these problems, and it has every flag of fairseq by
construction.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import Any, List, Tuple

from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import merge_with_parent
from fairseq.models.transformer import TransformerConfig
from omegaconf import II, DictConfig, OmegaConf, open_dict


def _flat_field(name: str, field: dataclasses.Field) -> Tuple[str, Any, Any]:
    default = field.default
    if default == II("model.decoder.embed_dim"):
        default = II("model.decoder_embed_dim")
    if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        return (
            name,
            field.type,
            dataclasses.field(default_factory=field.default_factory, metadata=field.metadata),
        )
    return name, field.type, dataclasses.field(default=default, metadata=field.metadata)


def _is_group(field_type: Any) -> bool:
    return isinstance(field_type, type) and issubclass(field_type, FairseqDataclass)


def _flat_fields(config: Any, prefix: str = "") -> List[Tuple[str, Any, Any]]:
    flat: List[Tuple[str, Any, Any]] = []
    for field in dataclasses.fields(config):
        if field.name == "_name":
            continue
        if _is_group(field.type):
            flat.extend(_flat_fields(field.type, prefix=f"{field.name}_"))
        else:
            flat.append(_flat_field(prefix + field.name, field))
    return flat


FlatTransformerConfig = dataclasses.make_dataclass(
    "FlatTransformerConfig", _flat_fields(TransformerConfig), bases=(FairseqDataclass,)
)


def to_namespace(model: Any, config: Any) -> Namespace:
    """The resolved flags of a model node, as fairseq's own architectures expect them.

    Under ``fairseq-hydra-train`` a node holds only what the user wrote, because fairseq fills in
    defaults before it imports the plugin. This function fills them in.

    Args:
        model: registered model class.
        config: model node (DictConfig) or legacy Namespace.
    """
    if isinstance(config, DictConfig):
        defaults = getattr(model, "__dataclass")()  # noqa: B009
        # With fairseq 0.12.2 and omegaconf 2.0, the functions of named architectures find None for
        # each field that the user did not write, and store it.
        with open_dict(config):
            for name, value in OmegaConf.to_container(config, resolve=False).items():
                if value is None and getattr(defaults, name, None) is not None:
                    del config[name]
        config = merge_with_parent(defaults, config)
        return Namespace(**OmegaConf.to_container(config, resolve=True, enum_to_str=True))
    return Namespace(**vars(config))
