"""The part of a trainer that this package reads and saves: weights, groups and extra state."""

from __future__ import annotations

import functools
import logging
from typing import Any, Callable, Dict, List, Tuple

import torch
from torch import Tensor, nn

from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.embeddings import Table
from spectral_fairseq.lm.averaged_sgd import saved_groups

# What fairseq's optimiser holds for a parameter: the weights that it trains, and its moments.


def trained_weights(optimizer: Any, parameter: Tensor) -> Tensor:
    """What fairseq's optimiser trains for a parameter: itself, or its float32 copy.

    Args:
        optimizer: as the trainer holds it.
        parameter: of the model.

    Returns:
        Shape of the parameter, without a gradient; writing to it changes what is trained.
    """
    held, offset = _held(optimizer, parameter)
    return _part(held, offset, parameter)


def moments(optimizer: Any, parameter: Tensor) -> Dict[str, Tensor]:
    """The tensors in the state of fairseq's optimiser that belong to a parameter.

    Args:
        optimizer: as the trainer holds it.
        parameter: of the model.

    Returns:
        Tensors by their names; writing to them changes the state. Those with as many entries as
        the parameter have its shape. There are none before the first step.
    """
    held, offset = _held(optimizer, parameter)
    state = optimizer.optimizer.state.get(held, {})
    return {
        name: _part(value, offset, parameter) if value.numel() == held.numel() else value
        for name, value in state.items()
        if isinstance(value, Tensor) and value.dim() > 0
    }


def _held(optimizer: Any, parameter: Tensor) -> Tuple[Tensor, int]:
    """The tensor that the optimiser trains, and where the parameter begins in it."""
    copies = getattr(optimizer, "fp32_params", None)
    if copies is None:
        return parameter, 0
    if not isinstance(copies, dict):  # --fp16-no-flatten-grads, --bf16
        (copy,) = (c for p, c in zip(optimizer.fp16_params, copies) if p is parameter)
        return copy, 0
    offset = 0  # one flat tensor for each device
    for other in optimizer.fp16_params:
        if other is parameter:
            break
        if other.device == parameter.device:
            offset += other.numel()
    return copies[parameter.device.index], offset


def _part(held: Tensor, offset: int, parameter: Tensor) -> Tensor:
    flat = held.detach().view(-1)
    return flat[offset : offset + parameter.numel()].view_as(parameter)


# Values that a feature keeps in the extra state of fairseq's checkpoints.
#
# fairseq saves the state of a criterion only if it has parameters, and saves that of a task without
# ever loading it again. The extra state is written by the trainer and sent to all workers when it
# is read.


def kept_in_checkpoints(
    name: str, state_of: Callable[[Any], Any], restore: Callable[[Any, Any], None]
) -> Dict[str, Callable[..., Any]]:
    """The functions of fairseq to replace, as ``patching.replaces`` takes them.

    Args:
        name: key in the extra state.
        state_of: what to save for a trainer; nothing is saved if it is empty.
        restore: gives a trainer what was saved, or ``None`` if the checkpoint lacks it. It is not
            called for a training that begins anew (``--reset-optimizer``).
    """

    def saving(save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save_checkpoint)
        def save_with_state(self: Any, filename: str, extra_state: Any) -> Any:
            state = state_of(self)
            return save_checkpoint(
                self, filename, {**extra_state, name: state} if state else extra_state
            )

        return save_with_state

    def loading(load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load_checkpoint)
        def load_with_state(
            self: Any, filename: str, reset_optimizer: bool = False, *args: Any, **kwargs: Any
        ) -> Any:
            extra_state = load_checkpoint(self, filename, reset_optimizer, *args, **kwargs)
            if extra_state is not None and not reset_optimizer:
                restore(self, extra_state.get(name))
            return extra_state

        return load_with_state

    for wrap in (saving, loading):
        wrap.__qualname__ += f"[{name}]"  # patching knows wrappers by their names
    return {
        "fairseq.trainer:Trainer.save_checkpoint": saving,
        "fairseq.trainer:Trainer.load_checkpoint": loading,
    }


# Weight decay acts once on a factored table.
#
# An SVD table stores W = U diag(sigma) V'. Decay of all three factors would shrink W three times as
# fast as that of a plain table. W is linear in sigma, so decay of sigma alone is decay of W, in the
# L2 form of SGD as in the decoupled form of fairseq's Adam. The other factors go into a parameter
# group of their own, whose weight decay is 0.


logger = logging.getLogger(__name__)

_ONE_GROUP = "weight decay acts on every factor of the factored tables, so it shrinks W faster than"


def undecayed_parameters(model: nn.Module) -> List[Tensor]:
    """The parameters of tables that weight decay should leave alone, each once."""
    found = {
        id(parameter): parameter
        for module in model.modules()
        if isinstance(module, Table)
        for parameter in (getattr(module, name) for name in module.undecayed)
        if parameter.requires_grad
    }
    return list(found.values())


def decay_once(optimizer: Any, model: nn.Module, scheduler: Any = None) -> None:
    """Give an optimiser a group without weight decay, and let it load states of either form.

    A state with one group was saved by an older version, or without weight decay. Training goes on
    with the weight decay that it has, on every factor, and a warning says so.

    Args:
        optimizer: fairseq's, wrapped for half precision or not.
        model: the model that it trains.
        scheduler: fairseq's schedule of the learning rate, which was built for one group.
    """
    parameters = undecayed_parameters(model)
    if not parameters:
        return
    inner = optimizer.optimizer
    parts = getattr(inner, "optimizers", None)  # of --optimizer composite
    if parts is not None:
        groups = [group for part in parts.values() for group in part.optimizer.param_groups]
    else:
        groups = getattr(inner, "param_groups", [])
    decays = any(group.get("weight_decay") for group in groups)
    stepped = _stepped(optimizer, parameters)
    shards = hasattr(inner, "optim")  # --zero-sharding, which divides its parameters anew
    whole = parts is None and not shards and len(groups) == 1
    if not whole or not _all_in(stepped, groups[0]["params"]):
        if decays:
            logger.warning(
                "%s a plain table: this optimiser has groups of its own, is sharded "
                "(--zero-sharding), or does not step them one by one (--fp16 needs "
                "--fp16-no-flatten-grads)",
                _ONE_GROUP,
            )
        return
    positions = [
        index
        for index, parameter in enumerate(groups[0]["params"])
        if any(parameter is one for one in stepped)
    ]

    def split() -> None:
        _split(inner, positions)
        plateau: Any = getattr(scheduler, "lr_scheduler", None)
        if hasattr(plateau, "min_lrs"):  # torch's ReduceLROnPlateau has one for each group
            plateau.min_lrs = plateau.min_lrs[:1] * len(inner.param_groups)

    if decays:
        split()
    optimizer.load_state_dict = _loading(optimizer.load_state_dict, inner, positions, split)


def _stepped(optimizer: Any, parameters: List[Tensor]) -> List[Tensor]:
    """What the optimiser changes in place of ``parameters``: itself, or a float32 copy."""
    copies = getattr(optimizer, "fp32_params", None)
    if copies is None:
        return parameters
    if not isinstance(copies, list):  # flattened
        return []
    pairs = zip(optimizer.fp16_params, copies)
    return [copy for half, copy in pairs if any(half is one for one in parameters)]


def _all_in(some: List[Tensor], all_of: List[Tensor]) -> bool:
    return bool(some) and all(any(one is other for other in all_of) for one in some)


def _split(inner: torch.optim.Optimizer, positions: List[int]) -> None:
    """Move parameters of the only group into a second one without weight decay."""
    (group,) = inner.param_groups
    options = {name: value for name, value in group.items() if name != "params"}
    kept, moved = _parted(group["params"], positions)
    group["params"] = kept
    inner.add_param_group({**options, "params": moved, "weight_decay": 0.0})


def _parted(items: List[Any], positions: List[int]) -> List[List[Any]]:
    chosen = set(positions)
    return [
        [item for index, item in enumerate(items) if (index in chosen) is wanted]
        for wanted in (False, True)
    ]


def _loading(
    load_state_dict: Callable[..., None],
    inner: torch.optim.Optimizer,
    positions: List[int],
    split: Callable[[], None],
) -> Callable[..., None]:
    @functools.wraps(load_state_dict)
    def load_either(state_dict: Dict[str, Any], optimizer_overrides: Any = None) -> None:
        saved = saved_groups(state_dict)
        begins = bool((optimizer_overrides or {}).get("weight_decay"))  # --optimizer-overrides
        if (len(saved) == 2 or begins) and len(inner.param_groups) == 1:
            split()
        if len(saved) == 1 and len(inner.param_groups) == 2:
            if saved[0].get("weight_decay"):
                logger.warning(
                    "%s with a new optimiser: the state that is restored is of an older version; "
                    "--reset-optimizer lets the decay act once",
                    _ONE_GROUP,
                )
            saved = [{**saved[0], "params": ids} for ids in _parted(saved[0]["params"], positions)]
        load_state_dict({**state_dict, "param_groups": saved}, optimizer_overrides)
        if len(saved) == 2:  # --optimizer-overrides are for the parameters that decay
            inner.param_groups[1]["weight_decay"] = saved[1]["weight_decay"]

    return load_either


def _deciding(build_optimizer: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(build_optimizer)
    def build_and_split(self: Any) -> None:
        build_optimizer(self)
        decay_once(self.optimizer, self.model, self._lr_scheduler)

    return build_and_split


FACTOR_DECAY = Patch(
    name="weight decay of factored tables",
    reason="Weight decay acts once on an SVD table rather than on each of its three factors.",
    install=replaces({"fairseq.trainer:Trainer._build_optimizer": _deciding}),
)
