"""Groups of parameters in fairseq's optimiser: the table's own rate and decay, and one decay.

    --table-lr-scale S --table-weight-decay D

fairseq builds an optimiser with one group. It is split into up to four: the output table or the
rest, and what weight decay acts on or not. An SVD table stores W = U diag(sigma) V', and decay of
all three would shrink W three times as fast as that of a plain table; W is linear in sigma, so
decay of sigma alone is decay of W, in the L2 form of SGD as in the decoupled form of fairseq's
Adam. Each group keeps at which places its parameters were in the one group, so that a state is
restored whatever the flags were with which it was saved.

Flags: ``--table-lr-scale`` 1, ``--table-weight-decay``.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from torch import Tensor, nn

from spectral_fairseq import refusals
from spectral_fairseq.compat.patching import Patch, replaces, wrapping
from spectral_fairseq.compat.resuming import float32_copies
from spectral_fairseq.embeddings.table import undecayed_parameters
from spectral_fairseq.lm.averaged_sgd import saved_groups
from spectral_fairseq.plugin.find import (
    check_trained,
    models_in,
    output_matrix,
    table_module,
    unwrapped,
)
from spectral_fairseq.plugin.registry import TABLE_LR_SCALE, TABLE_WEIGHT_DECAY

logger = logging.getLogger(__name__)

# What a group keeps beside the options of its optimiser.
_PLACES, _SCALE, _OWN_DECAY = "places", "lr_scale", "has_own_decay"


class TableOptions(NamedTuple):
    """What is asked for the output table.

    Attributes:
        lr_scale: factor on its learning rate.
        weight_decay: its own; ``None`` is that of the optimiser.
        parameters: those that store it.
    """

    lr_scale: float = 1.0
    weight_decay: Optional[float] = None
    parameters: Tuple[Tensor, ...] = ()


_NOTHING_ASKED = TableOptions()


class _Part(NamedTuple):
    """A group to be: where its parameters were in the one group, and what holds for them."""

    places: List[int]
    lr_scale: float
    decays: bool
    own_decay: Optional[float]


def table_options(cfg: Any, model: nn.Module, task: Any) -> TableOptions:
    """What a configuration asks for the output tables of a trainer's model.

    Raises:
        ConfigurationError: there is no such table, or it is not trained.
        UnsupportedError: the way of training has no group for it.
    """
    scale = getattr(cfg.criterion, TABLE_LR_SCALE.name, None)
    scale = float(TABLE_LR_SCALE.default) if scale is None else scale
    decay = getattr(cfg.criterion, TABLE_WEIGHT_DECAY.name, None)
    flags = {TABLE_LR_SCALE.flag: scale != 1, TABLE_WEIGHT_DECAY.flag: decay is not None}
    flag = next((name for name, is_given in flags.items() if is_given), None)
    if flag is None:
        return _NOTHING_ASKED
    refusals.TABLE_GROUPS.check(cfg, flag)
    parameters: List[Tensor] = []
    for submodel in models_in(unwrapped(model)):
        words = len(
            getattr(getattr(submodel, "decoder", submodel), "dictionary", task.target_dictionary)
        )
        check_trained(submodel, words, flag)
        table = table_module(submodel)
        parameters.extend([output_matrix(submodel, words)] if table is None else table.parameters())
    return TableOptions(
        scale, decay, tuple(parameter for parameter in parameters if parameter.requires_grad)
    )


def split_groups(
    optimizer: Any,
    model: nn.Module,
    table: TableOptions = _NOTHING_ASKED,
    scheduler: Any = None,
) -> None:
    """Split the one group of an optimiser, and let it load states with other groups.

    Args:
        optimizer: fairseq's, wrapped for half precision or not.
        model: that it trains.
        table: what is asked for its output table.
        scheduler: of the learning rate, which was built for one group.

    Raises:
        UnsupportedError: the output table is to have a group of its own, and cannot.
    """
    undecayed = [parameter for parameter in undecayed_parameters(model) if parameter.requires_grad]
    inner = optimizer.optimizer
    places = _places(optimizer, [*undecayed, *table.parameters])
    if places is None:
        if table.parameters:
            raise refusals.TABLE_GROUPS.error("flattened parameters, or groups of the optimiser")
        if undecayed and any(group.get("weight_decay") for group in _all_groups(inner)):
            logger.warning(
                "weight decay acts on every factor of the factored tables, so it shrinks W faster "
                "than a plain table: this optimiser has groups of its own, is sharded "
                "(--zero-sharding), or does not step them one by one (--fp16 needs "
                "--fp16-no-flatten-grads)"
            )
        return
    parts = _parts(inner, places[: len(undecayed)], places[len(undecayed) :], table)
    _regroup(inner, parts)
    if len(parts) > 1:
        plateau: Any = getattr(scheduler, "lr_scheduler", None)
        if hasattr(plateau, "min_lrs"):  # torch's ReduceLROnPlateau has one for each group
            plateau.min_lrs = [plateau.min_lrs[0] * part.lr_scale for part in parts]
    optimizer.load_state_dict = _loading(optimizer.load_state_dict, inner, parts)
    if table.parameters:
        set_lr = optimizer.set_lr
        optimizer.set_lr = functools.partial(_set_lr, set_lr, inner)
        optimizer.set_lr(optimizer.get_lr())
        logger.info(
            "the output table is trained at %g times the learning rate, with a weight decay of %g",
            table.lr_scale,
            inner.param_groups[-1]["weight_decay"]
            if table.weight_decay is None
            else table.weight_decay,
        )


def _set_lr(set_lr: Callable[[float], None], inner: Any, lr: float) -> None:
    set_lr(lr)
    for group in inner.param_groups:
        group["lr"] *= group.get(_SCALE, 1.0)


def _all_groups(inner: Any) -> List[Dict[str, Any]]:
    parts = getattr(inner, "optimizers", None)  # of --optimizer composite
    if parts is not None:
        return [group for part in parts.values() for group in part.optimizer.param_groups]
    return getattr(inner, "param_groups", [])


def _places(optimizer: Any, parameters: List[Tensor]) -> Optional[List[int]]:
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
    places = [
        place_of.get(id(copies.get(id(parameter), (parameter, 0))[0])) for parameter in parameters
    ]
    return None if None in places else places  # type: ignore[return-value]


def _parts(
    inner: Any, undecayed: List[int], of_table: List[int], table: TableOptions
) -> List[_Part]:
    parts: Dict[Tuple[bool, bool], List[int]] = {}
    for place in range(len(inner.param_groups[0]["params"])):
        key = (place in of_table, place in undecayed)
        parts.setdefault(key, []).append(place)
    return [
        _Part(
            places,
            table.lr_scale if is_table else 1.0,
            not is_undecayed,
            table.weight_decay if is_table else None,
        )
        for (is_table, is_undecayed), places in sorted(parts.items())
    ]


def _regroup(inner: Any, parts: List[_Part]) -> None:
    """Split the only group, and mark every group with what a saved state needs."""
    (group,) = inner.param_groups
    options = {name: value for name, value in group.items() if name != "params"}
    params = group["params"]
    for index, part in enumerate(parts):
        parameters = [params[place] for place in part.places]
        if index == 0:
            group["params"] = parameters
        else:
            inner.add_param_group({**options, "params": parameters})
        _settle(inner.param_groups[index], part, options.get("weight_decay", 0.0))


def _settle(group: Dict[str, Any], part: _Part, decay: float) -> None:
    if not part.decays:
        group["weight_decay"] = 0.0
    elif part.own_decay is not None:
        group["weight_decay"] = part.own_decay
    elif "weight_decay" in group:
        group["weight_decay"] = decay
    group[_PLACES], group[_SCALE] = list(part.places), part.lr_scale
    group[_OWN_DECAY] = part.decays and part.own_decay is not None


def _loading(
    load_state_dict: Callable[..., None], inner: Any, parts: List[_Part]
) -> Callable[..., None]:
    @functools.wraps(load_state_dict)
    def load_any(state_dict: Dict[str, Any], optimizer_overrides: Any = None) -> None:
        saved = saved_groups(state_dict)
        groups = _regrouped(saved, parts)
        load_state_dict(
            {**state_dict, "param_groups": saved if groups is None else groups}, optimizer_overrides
        )
        if groups is None:
            return
        for group, part, loaded in zip(inner.param_groups, parts, groups):
            group["lr"] *= part.lr_scale / loaded.get(_SCALE, 1.0)
            _settle(group, part, group.get("weight_decay", 0.0))

    return load_any


def _regrouped(saved: List[Dict[str, Any]], parts: List[_Part]) -> Optional[List[Dict[str, Any]]]:
    """Saved groups of any form as those of ``parts``; ``None`` if they are of other parameters."""
    everything = sorted(place for part in parts for place in part.places)
    places = [everything] if len(saved) == 1 else [group.get(_PLACES) for group in saved]
    origin: Dict[int, Tuple[int, Any]] = {}
    for index, (group, group_places) in enumerate(zip(saved, places)):
        if group_places is None or len(group_places) != len(group["params"]):
            return None
        origin.update({place: (index, key) for place, key in zip(group_places, group["params"])})
    if sorted(origin) != everything:
        return None
    groups = []
    for part in parts:
        source = Counter(origin[place][0] for place in part.places).most_common(1)[0][0]
        group = {**saved[source], "params": [origin[place][1] for place in part.places]}
        if group.get(_OWN_DECAY):  # asked for then, and perhaps not now
            group["weight_decay"] = saved[0].get("weight_decay", 0.0)
        groups.append(group)
    return groups


@wrapping
def _deciding(self: Any, *, original: Callable[..., None]) -> None:
    original(self)
    table = table_options(self.cfg, self.model, self.task)
    split_groups(self.optimizer, self.model, table, self._lr_scheduler)


GROUPS = Patch(
    name="groups of parameters",
    reason="Weight decay acts once on an SVD table rather than on each of its three factors, and "
    "the output table has a rate and a decay of its own (--table-lr-scale, --table-weight-decay).",
    install=replaces({"fairseq.trainer:Trainer._build_optimizer": _deciding}),
)
