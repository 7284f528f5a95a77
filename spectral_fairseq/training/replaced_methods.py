"""What a model of transformers may not do to the layers of a method, and how it is saved.

While a method is on a model, ``resize_token_embeddings`` and its like are refused, ``tie_weights``
leaves ties alone, and ``save_pretrained`` writes what plain transformers loads.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from typing import Any, Dict, Iterator, Mapping

import torch
from torch import Tensor, nn

from spectral_fairseq.errors import UnsupportedError
from spectral_fairseq.training.adapters import is_of_peft
from spectral_fairseq.training.joining import dense_from, is_split, joined_state
from spectral_fairseq.training.layer_mixins import OFF_FIRST, LayerMixin

# The settings of a saved model have it under this name.
RECORD = "spectral_fairseq"
_REPLACING = ("resize_token_embeddings", "set_input_embeddings", "set_output_embeddings")
_TIES, _SAVES = "tie_weights", "save_pretrained"


class StandIn:
    """Stands for a method of one model, as an attribute of it; :func:`stand_in` puts it there.

    Attributes:
        own: what the user or another package had put there; ``None`` for the method of the class.
    """

    own: Any = None

    def method(self, part: Any, name: str) -> Any:
        """The method as it would be without this."""
        return getattr(type(part), name).__get__(part) if self.own is None else self.own


def stand_in(part: nn.Module, name: str, made: StandIn) -> None:
    """Put a stand-in in the place of an attribute of a model, or of the stand-in that is there."""
    there = part.__dict__.get(name)
    made.own = there.own if isinstance(there, StandIn) else there
    part.__dict__[name] = made


def give_back(model: nn.Module) -> None:
    """Take all stand-ins off a model, and give it back what they stood for."""
    for part in model.modules():
        for name, there in [*part.__dict__.items()]:
            if isinstance(there, StandIn):
                del part.__dict__[name]
                if there.own is not None:
                    part.__dict__[name] = there.own
        getattr(getattr(part, "config", None), "__dict__", {}).pop(RECORD, None)


class _Refusing(StandIn):
    """Stands for a method of a model that replaces a layer while a method is on it.

    transformers makes a new, plain layer for a table that is not tied. The method would be lost in
    silence, and its optimiser would go on with parameters that nothing uses.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        wanted = "a table that keeps its size and its layers under a method"
        raise UnsupportedError(wanted, self.name, f"{OFF_FIRST} Or do this before it is put on.")


class _StaysTied(StandIn):
    """Stands for ``tie_weights``: layers that share a table are tied as long as it is there."""

    def __call__(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


class _Saving(StandIn):
    """Stands for ``save_pretrained``: what is saved loads in plain transformers, tied as it is.

    The file has the plain weights beside the entries of a table, and the model's settings say which
    methods are on it, for :func:`~spectral_fairseq.training.saving.restore_`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.model
        by_class, save = type(model).save_pretrained.__get__(model), self.method(model, _SAVES)
        arguments = inspect.signature(by_class).bind(*args, **kwargs).arguments
        folder = arguments.pop(next(iter(arguments)))  # which has any name in a user's own method
        more = arguments.pop("kwargs", {})
        state, splits = arguments.get("state_dict"), is_split(model)
        record = record_of(model)
        if state and not any(".table." in f".{name}" for name in state):
            record.pop("table", None)  # plain_state_dict has taken it off
        self._put_into_settings(record)
        if state is None and (record or splits):
            state = joined_state(model) if splits else model.state_dict()
        plain: Dict[str, Tensor] = {}
        if state is not None:  # transformers takes entries out of what it is given
            plain = plain_entries(model, state) if "table" in record else {}
            state = {**state, **plain}
        saved = None
        if state or not splits:  # the first worker writes what all have put together
            with _named_by_layers(model, plain if is_of_peft(model) else {}):
                saved = save(folder, **{**arguments, "state_dict": state}, **more)
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


@contextlib.contextmanager
def _named_by_layers(model: nn.Module, plain: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the state dicts of layers have their plain entries too within the block.

    Of a trained copy (``modules_to_save``) peft saves what the copy's own state dict names.
    """
    with contextlib.ExitStack() as hooks:
        for name, layer in model.named_modules() if plain else ():
            if f"{name}.weight" in plain:
                added = functools.partial(_with_weight, plain[f"{name}.weight"])
                hooks.callback(layer._register_state_dict_hook(added).remove)
        yield


def _with_weight(
    weight: Tensor, _: nn.Module, state: Dict[str, Tensor], prefix: str, *__: Any
) -> None:
    state[f"{prefix}weight"] = weight


def record_of(model: nn.Module) -> Dict[str, Any]:
    """What the methods on a model have to say in its settings."""
    record: Dict[str, Any] = {}
    for layer in model.modules():
        if isinstance(layer, LayerMixin):
            record.update(layer.recorded())
    return record


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


def keep_layers(model: nn.Module, tied: bool = False) -> None:
    """Refuse what replaces layers of a model of transformers, and of those in it.

    ``tied`` says that the layers of its table hold no parameters that could be tied.
    """
    for part in model.modules():
        for name in _REPLACING:
            if callable(getattr(type(part), name, None)):
                stand_in(part, name, _Refusing(name))
        if tied and callable(getattr(type(part), _TIES, None)):
            stand_in(part, _TIES, _StaysTied())
        if callable(getattr(type(part), _SAVES, None)):
            stand_in(part, _SAVES, _Saving(part))
