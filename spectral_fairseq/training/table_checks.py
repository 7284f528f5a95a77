"""What has to hold of a table before a method changes it: who uses it, and who holds it."""

from __future__ import annotations

import gc
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from torch import Tensor, nn

from spectral_fairseq.errors import ConfigurationError, UnsupportedError, check_range
from spectral_fairseq.functional.precision import HALVES
from spectral_fairseq.training.computed_weight import ComputedWeight
from spectral_fairseq.training.layer_mixins import OFF_FIRST
from spectral_fairseq.training.output_layer import output_layer, sharded, wrapped

PASS_WHOLE = "Pass the whole model, so that they stay tied."


def check_has_values(weight: Tensor, use: str) -> None:
    """Refuse a table on the device meta.

    Args:
        weight: the table.
        use: what needs its values, for the message.

    Raises:
        UnsupportedError: it has none.
    """
    if weight.is_meta:
        wanted, found = f"a model with values, for {use}", "one on the device meta"
        raise UnsupportedError(wanted, found, "Load or initialise the model first.")


def check_not_sharded(weight: Tensor) -> None:
    """Refuse a table of which this worker holds a part.

    Raises:
        UnsupportedError: a DTensor (fully_shard, tensor parallelism), or one of DeepSpeed's third
            stage.
    """
    if hasattr(weight, "ds_id"):
        raise sharded("one of DeepSpeed's third stage")
    if any(kind.__name__ in ("DTensor", "FlatParameter") for kind in type(weight).__mro__):
        raise sharded(f"a {type(weight).__name__}, split over devices")


def check_table(weight: Any, use: str, of: Optional[nn.Module] = None) -> None:
    """Refuse what is no table of float32 (or float64) that is trained, for a ``use`` of it.

    Args:
        weight: the table.
        use: what is to be done to it.
        of: the layer or the model that has it as a parameter, unless a weight was passed.

    Raises:
        UnsupportedError: it is quantised, of 16 bits, or overwritten by DeepSpeed's optimiser.
        ConfigurationError: it is no matrix, computed from other parameters, or frozen.
    """
    remedy = "Pass the model, or another layer."
    if weight.dim() != 2:
        raise ConfigurationError(f"a matrix for {use}", f"shape {tuple(weight.shape)}", remedy)
    if weight.dtype in HALVES or not weight.is_floating_point():
        raise UnsupportedError(
            f"a table of 32 or 64 bits for {use}",
            f"one of {weight.dtype}, in which small changes are lost",
            "Load the model in float32 and train it under autocast (bf16=True in Trainer).",
        )
    # Of its first two stages too, which clone all parameters into one vector, float32 ones as well.
    if hasattr(weight, "_hp_mapping"):
        raise UnsupportedError(
            f"a table that the optimiser itself steps, for {use}",
            "one that DeepSpeed's overwrites from a copy at each step, so that the change would be "
            "lost",
            "Call it before DeepSpeed takes the model; SpectrumControl needs "
            "DistributedDataParallel or fully_shard.",
        )
    if isinstance(weight, ComputedWeight):
        found = "one of weight_norm_ or factor_, which is computed from its entries"
        raise ConfigurationError(f"a plain table for {use}", found, OFF_FIRST)
    owned = of is None or any(parameter is weight for parameter in of.parameters())
    if not weight.is_leaf or not owned:  # a forward pass without gradients computes leaves
        raise _computed(use)
    if isinstance(weight, nn.Parameter) and not weight.requires_grad:
        wanted, remedy = f"a table that is trained, for {use}", "Set its requires_grad."
        raise ConfigurationError(wanted, "a frozen one", remedy)


def _computed(use: str) -> ConfigurationError:
    return ConfigurationError(
        f"a plain table for {use}",
        "one that is computed from other parameters, as by trainable tokens of peft or "
        "spectral_norm, prune and parametrize of torch.nn.utils",
        "Merge them into the model first (merge_and_unload, remove_parametrizations, "
        "remove_spectral_norm).",
    )


def excluded_rows(
    excluded: Optional[Sequence[int]], model: Union[nn.Module, Tensor], weight: Tensor
) -> List[int]:
    """Indices of rows that do not count, each once, from 0.

    Args:
        excluded: as the user gave them, negative ones counted from the end; ``None`` takes those of
            padding.
        model: whose look-ups may have padding, wrapped or not; or its table alone.
        weight: the table, shape (N, d), or another tensor of N rows.

    Raises:
        ConfigurationError: the table does not have them.
    """
    rows = weight.size(0)
    if excluded is None:
        excluded = rows_of_padding(model, weight) if isinstance(model, nn.Module) else ()
    for row in excluded:
        check_range("`excluded`", row, at_least=-rows, at_most=rows - 1, whole=True)
    return sorted({row % rows for row in excluded})


class Uses(NamedTuple):
    """A table and where a model uses it.

    Attributes:
        weight: W, shape (N, d).
        layers: name -> layer, each with ``weight``; the first one is to own what is put on.
        padding: rows of padding of the look-ups among them.
    """

    weight: nn.Parameter
    layers: Dict[str, nn.Module]
    padding: List[int]


def uses_of_table(model: nn.Module, use: str) -> Uses:
    """The layers that share the output table of a model, or the table of a layer.

    Args:
        model: a model, or a layer that shares its table with no layer outside it.
        use: what is to be done to the table.

    Raises:
        ConfigurationError: there is no such table, or a layer outside ``model`` shares it.
        UnsupportedError: a layer that uses it in a way that cannot be changed, or an optimiser that
            has it already.
    """
    if wrapped(model) is not None:
        found = f"a {type(model).__name__} around it"
        remedy = "Change the model first, and wrap or compile it afterwards."
        raise UnsupportedError(f"the model itself for {use}", found, remedy)
    weight: Any = output_layer(model).weight
    check_not_sharded(weight)
    check_table(weight, use)
    layers = {}
    for name, layer in model.named_modules():
        for key, parameter in layer._parameters.items():
            if parameter is not weight:
                continue
            problem = _cannot_change(layer, key)
            if problem:
                wanted = f"nn.Embedding and nn.Linear alone to use the table, for {use}"
                found = f"{name or 'the layer'}, {problem}"
                raise UnsupportedError(wanted, found, "Use a plain table for this model.")
            layers[name] = layer
    if not layers:  # spectral_norm of torch.nn.utils computes it before each forward pass
        raise _computed(use)
    _check_known(weight, layers, use)
    return Uses(weight, layers, rows_of_padding(model, weight))


def rows_of_padding(model: nn.Module, weight: Tensor) -> List[int]:
    """The rows of padding of the look-ups that use a table."""
    return sorted(
        {
            layer.padding_idx
            for layer in model.modules()
            if isinstance(layer, nn.Embedding)
            and layer._parameters.get("weight") is weight
            and layer.padding_idx is not None
        }
    )


def _cannot_change(layer: nn.Module, key: str) -> str:
    if key != "weight" or not isinstance(layer, (nn.Embedding, nn.Linear)):
        return f"a {type(layer).__name__} that has it as `{key}`"
    if hasattr(layer, "parametrizations"):
        return "which torch.nn.utils.parametrize has changed"
    if isinstance(layer, nn.Embedding):
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(layer, option):
                return f"an Embedding with `{option}`"
    return ""


def _check_known(weight: Tensor, layers: Dict[str, nn.Module], use: str) -> None:
    """Refuse a table that something else holds, which would go on with the old one in silence.

    After ``gc.freeze()`` nothing is found; ``optimizer_watch.py`` refuses the optimiser's step.
    """
    in_module, in_optimizer = _is_held(weight, [layer._parameters for layer in layers.values()])
    if in_module:
        wanted = f"all layers that share the table, for {use}"
        raise ConfigurationError(wanted, "one outside the layer that was passed", PASS_WHOLE)
    if in_optimizer:
        wanted, found = f"an optimiser that is made after {use}", "one that holds the old table"
        raise UnsupportedError(wanted, found, "Make the optimiser after that.")


def check_has_owner(weight: Tensor, use: str) -> None:
    """Refuse a tensor that neither a layer nor an optimiser has, such as one that was replaced.

    Raises:
        ConfigurationError: neither has it.
    """
    if not gc.get_freeze_count() and not any(_is_held(weight)):  # frozen objects are not found
        wanted = f"a weight that a layer or an optimiser has, for {use}"
        found = "one that none has (any more), as after fully_shard"
        raise ConfigurationError(wanted, found, "Pass the model, or the weight that is trained.")


def check_trained(weight: Tensor, trained: Any, what: str) -> None:
    """Refuse the table of another model than the one that is trained.

    Args:
        weight: the table.
        trained: the model, or the groups of its optimiser.
        what: has the table.

    Raises:
        ConfigurationError: it is of another model.
    """
    if isinstance(trained, nn.Module):
        parameters = list(trained.parameters())
    else:
        parameters = [parameter for group in trained for parameter in group["params"]]
    if not any(parameter is weight for parameter in parameters):
        raise of_another(what)


def of_another(what: str) -> ConfigurationError:
    """The error for what belongs to another model than the one that is trained."""
    return ConfigurationError(
        f"{what} to be of the model that is trained",
        "another model's, such as those of a copy, or of one before model_init made it anew",
        "Make it of that model. SpectrumControl and TablePenalty that are made without a model "
        "take the trained one: SpectralCallback(control=SpectrumControl(...)), "
        "fused_loss_(model, penalty=TablePenalty(...)).",
    )


def _is_held(weight: Tensor, known: Sequence[Dict[str, Any]] = ()) -> Tuple[bool, bool]:
    """Whether a module outside of ``known`` has it as a parameter, and whether an optimiser has it.

    Each call of ``gc.get_referrers`` goes through all objects of the process, so it is called only
    twice, for all layers together.
    """
    left = {id(parameters) for parameters in known}
    containers = [
        holder
        for holder in gc.get_referrers(weight)
        if isinstance(holder, (dict, list)) and id(holder) not in left
    ]
    of_modules, of_optimizers = set(), set()
    for owner in gc.get_referrers(*containers):
        if isinstance(owner, dict):
            of_modules.add(id(owner.get("_parameters")))
            if "lr" in owner:
                of_optimizers.add(id(owner.get("params")))
        elif isinstance(owner, nn.Module):
            of_modules.add(id(owner._parameters))
    found = {id(holder) for holder in containers}
    return bool(found & of_modules), bool(found & of_optimizers)
