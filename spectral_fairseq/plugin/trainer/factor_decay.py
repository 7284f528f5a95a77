"""Weight decay acts once on a factored table.

An SVD table stores W = U diag(sigma) V'. Decay of all three factors would shrink W three times as
fast as that of a plain table. W is linear in sigma, so decay of sigma alone is decay of W, in the
L2 form of SGD as in the decoupled form of fairseq's Adam. The other factors go into a parameter
group of their own, whose weight decay is 0.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Callable, Dict, List

import torch
from torch import Tensor, nn

from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.embeddings import Table
from spectral_fairseq.lm.averaged_sgd import saved_groups

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
