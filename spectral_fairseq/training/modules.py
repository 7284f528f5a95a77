"""The layers of a model that exists: which ones use a table, and how they get another method.

Note [LayerMixin classes]
----------------------
A layer keeps its place, its name and its other attributes; only its class becomes a subclass of the
one that it had, with a mixin of this package before it. ``isinstance``, ``get_input_embeddings``,
ties and the keys of the other entries stay as they are, and giving the old class back takes the
method off without a trace. torch's own parametrizations work like this, but refuse to be pickled
and know one layer each, while a tied table has several.
"""

from __future__ import annotations

import functools
import gc
import inspect
import warnings
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence, Tuple, Type

import torch
from torch import Tensor, nn

from spectral_fairseq.errors import ConfigurationError, UnsupportedError, check_range, check_type
from spectral_fairseq.functional.precision import HALVES
from spectral_fairseq.methods.output_layers import output_names
from spectral_fairseq.training.computed_weight import ComputedWeight
from spectral_fairseq.training.joining import dense_from, is_split, joined_state

OUTPUT_LAYERS = output_names("attribute")
WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


class LayerMixin(nn.Module):
    """Base class of the mixins; see Note [LayerMixin classes].

    Class attributes:
        fixed: names of attributes that cannot be set while the mixin is there.
        order: place among the mixins of a layer, the smallest first.
        computes_weight: whether ``weight`` is computed at each use.
    """

    fixed: Tuple[str, ...] = ()
    order = 0
    computes_weight = False
    # Of a layer's class: the one that it had, and the mixins before it.
    parts: Tuple[Type[nn.Module], Tuple[Type[LayerMixin], ...]]

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what would have no effect, or would break a tie in silence."""
        if name in self.fixed:
            raise UnsupportedError(
                f"`{name}` of {type(self).__name__} to stay as it is under a method",
                "another value for it, as tie_weights and resize_token_embeddings set one",
                _OFF_FIRST,
            )
        super().__setattr__(name, value)

    def recorded(self) -> Dict[str, Any]:
        """What the settings of a saved model say of it, as JSON; nothing of what only trains."""
        return {}

    def plain_entries(self, dense: Callable[[Any], Tensor]) -> Dict[str, Tensor]:  # noqa: ARG002
        """The entries of a state dict by which a plain layer computes the same.

        Args:
            dense: the matrix of a table, the same tensor whenever it is asked for.
        """
        return {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The class is made at run time, so pickle and deepcopy are told how."""
        return _empty, self.parts, self.__dict__


_classes: Dict[Any, Type[nn.Module]] = {}


def _changed_class(base: Type[nn.Module], mixins: Tuple[Type[LayerMixin], ...]) -> Type[nn.Module]:
    if (base, mixins) in _classes:
        return _classes[base, mixins]
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    fixed = tuple(name for mixin in mixins for name in mixin.fixed)
    names.update(fixed=fixed, parts=(base, mixins))
    return _classes.setdefault((base, mixins), type(base.__name__, (*mixins, base), names))


def _empty(base: Type[nn.Module], mixins: Tuple[Type[LayerMixin], ...]) -> nn.Module:
    kind = _changed_class(base, mixins)
    made: nn.Module = kind.__new__(kind)
    return made


def _parts(layer: nn.Module) -> Tuple[Type[nn.Module], Tuple[Type[LayerMixin], ...]]:
    return layer.parts if isinstance(layer, LayerMixin) else (type(layer), ())


def forward_of(layer: nn.Module) -> Any:
    """The forward pass of a layer's class, without mixins."""
    return _parts(layer)[0].forward


def put_on(layer: nn.Module, mixin: Type[LayerMixin]) -> None:
    """Put a mixin before the class of a layer."""
    base, mixins = _parts(layer)
    layer.__class__ = _changed_class(base, tuple(sorted((*mixins, mixin), key=lambda m: m.order)))


def take_off(layer: nn.Module, mixin: Type[LayerMixin]) -> None:
    """Take a mixin away again, or one that is derived from it."""
    base, mixins = _parts(layer)
    mixins = tuple(other for other in mixins if not issubclass(other, mixin))
    layer.__class__ = _changed_class(base, mixins) if mixins else base


class _Refusing:
    """Stands for a method of a model that replaces a layer while a method is on it.

    transformers makes a new, plain layer for a table that is not tied. The method would be lost in
    silence, and its optimiser would go on with parameters that nothing uses.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        wanted = "a table that keeps its size and its layers under a method"
        raise UnsupportedError(wanted, self.name, f"{_OFF_FIRST} Or do this before it is put on.")


class _StaysTied:
    """Stands for ``tie_weights``: layers that share a table are tied as long as it is there."""

    def __call__(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


# The settings of a saved model have it under this name.
RECORD = "spectral_fairseq"


def record_of(model: nn.Module) -> Dict[str, Any]:
    """What the methods on a model have to say in its settings."""
    record: Dict[str, Any] = {}
    for layer in model.modules():
        if isinstance(layer, LayerMixin):
            record.update(layer.recorded())
    return record


class _Saving:
    """Stands for ``save_pretrained``: what is saved loads in plain transformers, tied as it is.

    The file has the plain weights beside the entries of a table, and the model's settings say which
    methods are on it, for :func:`~spectral_fairseq.training.saving.restore_`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.model
        save = type(model).save_pretrained.__get__(model)
        arguments = inspect.signature(save).bind(*args, **kwargs).arguments
        more = arguments.pop("kwargs", {})
        state, splits = arguments.get("state_dict"), is_split(model)
        record = record_of(model)
        if state and not any(".table." in f".{name}" for name in state):
            record.pop("table", None)  # plain_state_dict has taken it off
        self._put_into_settings(record)
        if state is None and (record or splits):
            state = joined_state(model) if splits else model.state_dict()
        if state is not None:  # transformers takes entries out of what it is given
            state = {**state, **(plain_entries(model, state) if "table" in record else {})}
        saved = None
        if state or not splits:  # the first worker writes what all have put together
            saved = save(**{**arguments, "state_dict": state}, **more)
        if splits:
            torch.distributed.barrier()
        return saved

    def _put_into_settings(self, record: Dict[str, Any]) -> None:
        config = getattr(self.model, "config", None)
        if hasattr(config, "to_diff_dict"):
            config.__dict__.pop(RECORD, None)
            if record:
                setattr(config, RECORD, record)
        elif record:
            warnings.warn(
                f"{type(self.model).__name__} has no settings of transformers, so the file does "
                f"not say that {', '.join(record)} of spectral_fairseq.training is on it: do the "
                "same to a model before you load it, or take it off first, with plain_(model)",
                stacklevel=3,
            )


def plain_entries(model: nn.Module, state: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """The entries by which a plain model computes what a model with a table does.

    Nothing is kept from one call to the next: torch's fused optimisers change parameters without
    changing their version.

    Args:
        model: whose tables are asked for their matrices.
        state: the entries of the model, whole ones.
    """
    if not state:
        return {}
    names = {module: name for name, module in model.named_modules()}

    @functools.lru_cache(None)
    def dense(table: Any) -> Tensor:
        own = f"{names[table]}."
        entries = {key[len(own) :]: one for key, one in state.items() if key.startswith(own)}
        return dense_from(table, entries)

    found: Dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LayerMixin):
            entries = layer.plain_entries(dense)
            found.update({f"{name}.{key}".lstrip("."): entry for key, entry in entries.items()})
    return found


_REPLACING = ("resize_token_embeddings", "set_input_embeddings", "set_output_embeddings")
_TIES, _SAVES = "tie_weights", "save_pretrained"


def keep_layers(model: nn.Module, tied: bool = False) -> None:
    """Refuse what replaces layers of a model of transformers, and of those in it.

    ``tied`` says that the layers of its table hold no parameters that could be tied.
    """
    for part in model.modules():
        for name in _REPLACING:
            if callable(getattr(type(part), name, None)):
                part.__dict__[name] = _Refusing(name)
        if tied and callable(getattr(type(part), _TIES, None)):
            part.__dict__[_TIES] = _StaysTied()
        if callable(getattr(type(part), _SAVES, None)):
            part.__dict__[_SAVES] = _Saving(part)


def let_replace(model: nn.Module) -> None:
    """Undo :func:`keep_layers`."""
    for part in model.modules():
        for name in (*_REPLACING, _TIES, _SAVES):
            if isinstance(part.__dict__.get(name), (_Refusing, _StaysTied, _Saving)):
                del part.__dict__[name]
        getattr(getattr(part, "config", None), "__dict__", {}).pop(RECORD, None)


_OFF_FIRST = "Take the method of spectral_fairseq.training off first, with plain_(model)."
PASS_WHOLE = "Pass the whole model, so that they stay tied."


def sharded(found: str) -> UnsupportedError:
    """The error for a table of which each worker holds a part."""
    remedy = "Keep it whole: use DistributedDataParallel, or DeepSpeed's second stage."
    return UnsupportedError("every worker to hold the whole table", found, remedy)


def without_wrappers(model: nn.Module) -> nn.Module:
    """The model inside ``DistributedDataParallel``, ``torch.compile``, peft and the like.

    Raises:
        ConfigurationError: it is no module.
        UnsupportedError: parameters that FSDP flattens.
    """
    check_type(model, nn.Module, "a model or a layer", "Pass the model.")
    while True:
        if type(model).__name__ == "FullyShardedDataParallel":
            raise sharded("parameters that FullyShardedDataParallel splits over workers")
        inner = model._modules.get("_orig_mod")  # of torch.compile
        if inner is None and type(model).__name__ in WRAPPERS:
            inner = model._modules.get("module")
        if inner is None and is_of_peft(model) and hasattr(model, "get_base_model"):
            inner = model.get_base_model()  # type: ignore[operator]
        if inner is None:
            return model
        model = inner


def is_of_peft(layer: nn.Module) -> bool:
    """Whether a module is one of peft's, around a model or one of its layers."""
    return any(kind.__module__.split(".")[0] == "peft" for kind in type(layer).__mro__)


def _trained_copy(layer: Any) -> Any:
    """The layer that is trained in the place of ``layer``: peft's copy for ``modules_to_save``."""
    copies = getattr(layer, "modules_to_save", None)
    if not (isinstance(layer, nn.Module) and is_of_peft(layer) and copies is not None):
        return layer
    active = getattr(layer, "active_adapters", None) or [layer.active_adapter]
    return copies[active[0]] if active[0] in copies else layer.original_module


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
    layers = [getattr(model, "get_output_embeddings", lambda: None)()]
    layers += [getattr(model, name, None) for name in OUTPUT_LAYERS]
    for layer in map(_trained_copy, layers):
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


def excluded_rows(excluded: Sequence[int], rows: int) -> List[int]:
    """Indices of rows that do not count, each once, from 0; negative ones count from the end.

    Raises:
        ConfigurationError: a table of so many ``rows`` does not have them.
    """
    for row in excluded:
        check_range("`excluded`", row, at_least=-rows, at_most=rows - 1, whole=True)
    return sorted({row % rows for row in excluded})


def check_table(weight: Any, use: str) -> None:
    """Refuse what is no table of float32 (or float64) that is trained, for a ``use`` of it.

    Raises:
        UnsupportedError: it is quantised, or of 16 bits.
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
    if isinstance(weight, ComputedWeight):
        found = "one of weight_norm_ or factor_, which is computed from its entries"
        raise ConfigurationError(f"a plain table for {use}", found, _OFF_FIRST)
    if not weight.is_leaf:
        raise ConfigurationError(
            f"a plain table for {use}",
            "one that is computed from other parameters, as by trainable tokens of peft or "
            "torch.nn.utils.parametrize",
            "Merge them into the model first (merge_and_unload, remove_parametrizations).",
        )
    if isinstance(weight, nn.Parameter) and not weight.requires_grad:
        wanted, remedy = f"a table that is trained, for {use}", "Set its requires_grad."
        raise ConfigurationError(wanted, "a frozen one", remedy)


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
    if type(model).__name__ in WRAPPERS or "_orig_mod" in getattr(model, "_modules", ()):
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
    """Refuse a table that something else holds, which would go on with the old one in silence."""
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
    if not any(_is_held(weight)):
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
