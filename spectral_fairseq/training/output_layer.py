"""Which layer of a model has the output table, behind what is wrapped around the model."""

from __future__ import annotations

import itertools
from typing import Any, Optional

from torch import Tensor, nn

from spectral_fairseq.errors import ConfigurationError, UnsupportedError, check_type
from spectral_fairseq.methods.output_layers import output_names
from spectral_fairseq.training.adapters import is_of_peft, trained_copy
from spectral_fairseq.training.layer_mixins import LayerMixin

OUTPUT_LAYERS = output_names("attribute")
_PARALLEL = ("DistributedDataParallel", "DataParallel")


def sharded(found: str) -> UnsupportedError:
    """The error for a table of which each worker holds a part."""
    remedy = (
        "Keep it whole: use DistributedDataParallel, or, without SpectrumControl, DeepSpeed's "
        "second stage."
    )
    return UnsupportedError("every worker to hold the whole table", found, remedy)


def wrapped(model: nn.Module) -> Optional[nn.Module]:
    """The model that ``DistributedDataParallel`` or ``torch.compile`` has put into this one.

    Raises:
        UnsupportedError: parameters that FSDP flattens.
    """
    if type(model).__name__ == "FullyShardedDataParallel":
        raise sharded("parameters that FullyShardedDataParallel splits over workers")
    name = "module" if type(model).__name__ in _PARALLEL else "_orig_mod"
    return getattr(model, "_modules", {}).get(name)


def without_wrappers(model: nn.Module) -> nn.Module:
    """The model inside ``DistributedDataParallel``, ``torch.compile``, peft and the like.

    Raises:
        ConfigurationError: it is no module.
        UnsupportedError: parameters that FSDP flattens.
    """
    check_type(model, nn.Module, "a model or a layer", "Pass the model.")
    while True:
        inner = wrapped(model)
        if inner is None and is_of_peft(model) and hasattr(model, "get_base_model"):
            inner = model.get_base_model()  # type: ignore[operator]
        if inner is None:
            return model
        model = inner


def output_layer(model: nn.Module) -> nn.Module:
    """The layer whose ``weight`` is the output table W, shape (N, d).

    Args:
        model: a model of transformers, or any other with ``get_output_embeddings`` or a layer of
            one of the names in :data:`OUTPUT_LAYERS`; a ``Linear``, an ``Embedding`` or an
            ``EmbeddingBag`` is its own.

    Raises:
        ConfigurationError: there is none.
    """
    model = without_wrappers(model)
    if isinstance(model, (nn.Linear, nn.Embedding, nn.EmbeddingBag)):
        return model
    told = getattr(model, "get_output_embeddings", lambda: None)()
    named = (getattr(model, name, None) for name in OUTPUT_LAYERS)
    for layer in map(trained_copy, itertools.chain([told], named)):
        if isinstance(layer, LayerMixin) and layer.computes_weight:
            return layer  # whose matrix would be computed for nothing, or is split at this moment
        weight = getattr(layer, "weight", None) if isinstance(layer, nn.Module) else None
        if isinstance(weight, Tensor) and weight.dim() == 2:
            return layer  # type: ignore[no-any-return]
    wanted = f"a model with an output layer: get_output_embeddings(), or {', '.join(OUTPUT_LAYERS)}"
    found = f"none in {type(model).__name__}"
    raise ConfigurationError(wanted, found, "Pass the layer, or its weight.")


def weight_of(model: Any, use: str) -> Tensor:
    """The output table of a model or of a layer, shape (N, d), or the weight that was passed.

    Raises:
        ConfigurationError: there is none.
    """
    weight: Any = output_layer(model).weight if isinstance(model, nn.Module) else model
    check_type(weight, Tensor, f"a model, a layer or a weight, for {use}", "Pass the model.")
    return weight
