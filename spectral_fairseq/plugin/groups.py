"""Two groups of parameters in fairseq's optimiser, so that weight decay acts once on an SVD table.

fairseq builds an optimiser with one group, in which vectors decay as matrices do. U and V of an SVD
table get a group without decay; methods/groups.py says why. Each group keeps at which places its
parameters were in the one group, so that a state is restored whether its optimiser was split or
not.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Callable, Dict, List, Optional

from torch import Tensor, nn

from spectral_fairseq.compat.float32_weights import float32_copies
from spectral_fairseq.compat.patching import Patch, replaces, wrapping
from spectral_fairseq.errors import NEW_STATE, OTHER_FOLDER, CheckpointError
from spectral_fairseq.lm.wide_state import saved_groups
from spectral_fairseq.methods.groups import undecayed_parameters

logger = logging.getLogger(__name__)

_PLACES = "places"  # what a group keeps beside the options of its optimiser


def split_groups(optimizer: Any, model: nn.Module, scheduler: Any = None) -> None:
    """Split the one group of an optimiser, and let it load states with other groups.

    Args:
        optimizer: fairseq's, wrapped for half precision or not.
        model: the model that it trains.
        scheduler: the schedule of the learning rate, which was built for one group.
    """
    undecayed = [parameter for parameter in undecayed_parameters(model) if parameter.requires_grad]
    inner = optimizer.optimizer
    places = _places(optimizer, undecayed)
    if places is None:
        if undecayed and any(group.get("weight_decay") for group in _all_groups(inner)):
            logger.warning(
                "weight decay acts on every factor of the factored tables, so it shrinks W faster "
                "than a plain table: this optimiser has groups of its own, is sharded "
                "(--zero-sharding), or does not step them one by one (--fp16 needs "
                "--fp16-no-flatten-grads)"
            )
        return
    _split(inner, places)
    plateau: Any = getattr(scheduler, "lr_scheduler", None)
    if hasattr(plateau, "min_lrs"):  # torch's ReduceLROnPlateau has one for each group
        plateau.min_lrs = plateau.min_lrs[:1] * len(inner.param_groups)
    if hasattr(optimizer, "initial_state"):  # --use-bmuf goes back to it after its warm-up
        optimizer.initial_state = optimizer.state_dict()
    optimizer.load_state_dict = _loading(optimizer.load_state_dict, inner)


def _all_groups(inner: Any) -> List[Dict[str, Any]]:
    parts = getattr(inner, "optimizers", None)  # of --optimizer composite
    if parts is not None:
        return [group for part in parts.values() for group in part.optimizer.param_groups]
    return getattr(inner, "param_groups", [])


def _places(optimizer: Any, parameters: List[nn.Parameter]) -> Optional[List[int]]:
    """Where parameters are in the only group of an optimiser; ``None`` if it has no such places."""
    inner = optimizer.optimizer
    if hasattr(inner, "optimizers") or hasattr(inner, "optim"):  # composite; --zero-sharding
        return None
    groups = getattr(inner, "param_groups", [])
    if len(groups) != 1:
        return None
    copies = float32_copies(optimizer)
    if len({id(copy) for copy, _ in copies.values()}) < len(copies):  # flattened
        return None
    place_of = {id(parameter): place for place, parameter in enumerate(groups[0]["params"])}
    stepped: List[Tensor] = [copies.get(id(one), (one, 0))[0] for one in parameters]
    places = [place_of.get(id(one)) for one in stepped]
    return None if None in places else places  # type: ignore[return-value]


def _split(inner: Any, undecayed: List[int]) -> None:
    """Give what is at the places ``undecayed`` of the only group another one, without decay."""
    (group,) = inner.param_groups
    options = {name: value for name, value in group.items() if name != "params"}
    params, moved = group["params"], sorted(undecayed)
    kept = [place for place in range(len(params)) if place not in undecayed]
    group["params"], group[_PLACES] = [params[place] for place in kept], kept
    if moved:
        own = {"params": [params[place] for place in moved], _PLACES: moved, "weight_decay": 0.0}
        inner.add_param_group({**options, **own})


def _loading(load_state_dict: Callable[..., None], inner: Any) -> Callable[..., None]:
    places = [list(group[_PLACES]) for group in inner.param_groups]

    @functools.wraps(load_state_dict)
    def load_any(state_dict: Dict[str, Any], optimizer_overrides: Any = None) -> None:
        saved = saved_groups(state_dict)
        groups = _regrouped(saved, places)
        if groups is not None:
            load_state_dict({**state_dict, "param_groups": groups}, optimizer_overrides)
            for group, own_places in zip(inner.param_groups, places):
                group[_PLACES] = list(own_places)
            for group in inner.param_groups[1:]:
                group["weight_decay"] = 0.0
            return
        try:
            load_state_dict(state_dict, optimizer_overrides)
        except CheckpointError:
            raise
        except ValueError as error:
            # torch refuses groups of other sizes, as where a table has become one of another kind.
            own, others = sum(map(len, places)), sum(len(group["params"]) for group in saved)
            raise CheckpointError(
                f"the state of an optimiser of {own} parameters, as this model has",
                f"one of {others}, of a model with other tables or layers",
                f"{NEW_STATE} {OTHER_FOLDER}",
            ) from error

    return load_any


def _regrouped(
    saved: List[Dict[str, Any]], places: List[List[int]]
) -> Optional[List[Dict[str, Any]]]:
    """Saved groups, split or not, as those at ``places``; ``None`` if they are of other parameters.

    All groups of a saved optimiser have the same options but for the decay.
    """
    everything = sorted(place for own in places for place in own)
    at = [everything] if len(saved) == 1 else [group.get(_PLACES) for group in saved]
    keys: Dict[int, Any] = {}
    for group, own in zip(saved, at):
        if own is None or len(own) != len(group["params"]):
            return None
        keys.update(zip(own, group["params"]))
    if sorted(keys) != everything:
        return None
    return [{**saved[0], "params": [keys[place] for place in own]} for own in places]


@wrapping
def _splitting(self: Any, *, original: Callable[..., None]) -> None:
    original(self)
    split_groups(self.optimizer, self.model, self._lr_scheduler)


GROUPS = Patch(
    name="groups of parameters",
    reason="Weight decay acts once on an SVD table rather than on each of its three factors.",
    install=replaces({"fairseq.trainer:Trainer._build_optimizer": _splitting}),
)
