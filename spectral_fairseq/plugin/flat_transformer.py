"""fairseq's nested Transformer configuration as one flat dataclass.

A subclass of the nested configuration fails with one of the supported versions of fairseq and
silently ignores ``--encoder-layers`` with another. An argparse-style architecture loses its own
flags under hydra and writes ``argparse.Namespace`` objects into checkpoints. A flat dataclass
with the fields of the installed fairseq has none of these problems, and it has every flag of
fairseq by construction.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import Any, Dict, List, Optional, Tuple

from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import merge_with_parent
from fairseq.models.transformer import TransformerConfig
from omegaconf import II, DictConfig, OmegaConf, open_dict


def _flat_fields(config: Any, prefix: str = "") -> List[Tuple[str, Any, Any]]:
    flat: List[Tuple[str, Any, Any]] = []
    for field in dataclasses.fields(config):
        if field.name == "_name":
            continue
        if isinstance(field.type, type) and issubclass(field.type, FairseqDataclass):
            flat.extend(_flat_fields(field.type, prefix=f"{field.name}_"))
            continue
        settings: Dict[str, Any] = {
            name: getattr(field, name) for name in ("default", "default_factory", "metadata")
        }
        if field.default == II("model.decoder.embed_dim"):
            settings["default"] = II("model.decoder_embed_dim")
        # fairseq declares a list, and its models read a text, as its examples/layerdrop gives it.
        kind = Optional[str] if field.name == "layers_to_keep" else field.type
        flat.append((prefix + field.name, kind, dataclasses.field(**settings)))
    return flat


FlatTransformerConfig = dataclasses.make_dataclass(
    "FlatTransformerConfig", _flat_fields(TransformerConfig), bases=(FairseqDataclass,)
)


def to_namespace(model: Any, config: Any) -> Namespace:
    """The resolved flags of a model node, as fairseq's own architectures expect them.

    Under ``fairseq-hydra-train`` a node holds only what the user wrote, because fairseq fills in
    defaults before it imports the plugin. This function fills them in. A model without a dataclass
    has a Namespace.
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
