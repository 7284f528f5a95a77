"""The parameters of a model in groups for an optimiser, with a rate and a decay of the table's own.

    optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-3, weight_decay=0.1))

Matrices decay and vectors do not, as usual. A table of ``factor_`` is the product U diag(sigma) V':
were all three to shrink, the matrix would decay three times, and U and V would leave
orthonormality. So sigma decays alone.
"""

from __future__ import annotations

import importlib
from typing import Any, Dict, List, Optional
from weakref import WeakSet

from torch import nn

from spectral_fairseq.embeddings.table import Table, undecayed_parameters
from spectral_fairseq.errors import ConfigurationError, check_range
from spectral_fairseq.lm.muon import hidden_matrices_by_name
from spectral_fairseq.training.modules import output_layer, without_wrappers
from spectral_fairseq.training.tables import FACTORED, FactoredLayer


def parameter_groups(
    model: nn.Module,
    *,
    lr: Optional[float] = None,
    weight_decay: float = 0.0,
    table_lr: Optional[float] = None,
    table_weight_decay: Optional[float] = None,
) -> List[Dict[str, Any]]:
    """Return groups of all trained parameters, for any optimiser of torch.

    Args:
        model: of transformers, or any other with an output layer.
        lr: learning rate; ``None`` leaves it to the optimiser.
        weight_decay: of matrices, and of the lengths or singular values of a table.
        table_lr: learning rate of the output table, whatever it is stored as, and of what shares
            it; ``None`` takes ``lr``.
        table_weight_decay: of the output table; ``None`` takes ``weight_decay``.

    Returns:
        Up to four groups: matrices, vectors, what decays of the table, and its other factors.

    Raises:
        ConfigurationError: a number outside its range, or no output table where one is needed.
    """
    numbers = {"lr": lr, "weight_decay": weight_decay}
    numbers.update(table_lr=table_lr, table_weight_decay=table_weight_decay)
    for name, value in numbers.items():
        check_range(f"`{name}`", value, at_least=0, optional=True)
    apart = table_lr is not None or table_weight_decay is not None
    of_table = {id(parameter) for parameter in _table_parameters(model)} if apart else set()
    undecayed = {id(parameter) for parameter in undecayed_parameters(without_wrappers(model))}
    decaying = set(of_table)
    for table in without_wrappers(model).modules():
        if isinstance(table, Table):
            decaying |= {id(parameter) for parameter in table.parameters(recurse=False)}
    decaying -= undecayed
    parts: Dict[Any, List[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            key = id(parameter)
            decays = key in decaying or (parameter.dim() > 1 and key not in undecayed)
            parts.setdefault((key in of_table, decays), []).append(parameter)
    groups = []
    for (is_table, decays), parameters in sorted(parts.items(), key=lambda item: item[0]):
        rate = table_lr if is_table and table_lr is not None else lr
        decay = weight_decay
        if is_table and table_weight_decay is not None:
            decay = table_weight_decay
        group: Dict[str, Any] = {"params": parameters, "weight_decay": decay if decays else 0.0}
        groups.append(group if rate is None else {**group, "lr": rate})
    return groups


def hidden_matrices(model: nn.Module) -> List[nn.Parameter]:
    """Return the trained matrices of a model that are no tables: what ``Muon`` is made for.

        optimizer = Muon(parameter_groups(model, lr=1e-3, weight_decay=0.1), hidden_matrices(model))

    Args:
        model: of transformers, or any other with an output layer.

    Returns:
        The parameters of two dimensions that are weights, without those of look-ups and of the
        output layer.

    Raises:
        ConfigurationError: no output layer.
    """
    return list(hidden_matrices_by_name(without_wrappers(model), _table_parameters(model)).values())


def _table_parameters(model: nn.Module) -> List[nn.Parameter]:
    layer = output_layer(model)
    if isinstance(layer, FactoredLayer):
        return list(layer.used_table.parameters())
    weight: Any = layer.weight
    return [weight]


# A loop that passes model.parameters() to AdamW would decay a table of factor_ three times, and so
# would the groups of Trainer. torch calls the hook before each step of every optimiser.

_checked: WeakSet[Any] = WeakSet()


def check_decay(optimizer: Any) -> None:
    """Refuse an optimiser that lets U or V of a table of ``factor_`` decay.

    Raises:
        ConfigurationError: it does.
    """
    for group in getattr(optimizer, "param_groups", ()):
        if not group.get("weight_decay"):
            continue
        held = {id(parameter) for parameter in group["params"]}
        if any(
            id(parameter) in held for table in FACTORED for parameter in undecayed_parameters(table)
        ):
            raise ConfigurationError(
                "a weight decay that acts on a table of factor_ once, on its sigma",
                f"{type(optimizer).__name__} with weight_decay {group['weight_decay']:g} for U, V "
                "and sigma alike, which would act three times",
                "Make the optimiser from spectral_fairseq.training.parameter_groups(model, lr=..., "
                "weight_decay=...); for Trainer pass optimizers=(that optimiser, None).",
            )


def _before_step(optimizer: Any, *_: Any) -> None:
    if FACTORED and optimizer not in _checked:
        check_decay(optimizer)
        _checked.add(optimizer)


_register = getattr(
    importlib.import_module("torch.optim.optimizer"), "register_optimizer_step_pre_hook", None
)
if _register is not None:  # from torch 2.0 on
    _register(_before_step)
