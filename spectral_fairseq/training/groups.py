"""The parameters of a model in groups for an optimiser, with a rate and a decay of the table's own.

    optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-3, weight_decay=0.1))

Matrices decay and vectors do not, as usual. A table of ``factor_`` is the product U diag(sigma)
V': were all three to shrink, the matrix would decay three times, and U and V would leave
orthonormality. So sigma decays alone.

``optimizer_watch.py`` refuses an optimiser that was made otherwise.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional

from torch import nn

from spectral_fairseq.errors import check_range
from spectral_fairseq.lm.muon import hidden_matrices_by_name
from spectral_fairseq.methods.groups import decaying_parameters
from spectral_fairseq.training.factored_layers import FactoredLayer
from spectral_fairseq.training.output_layer import output_layer, without_wrappers


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
        Up to four groups: vectors, matrices, what does not decay of a table with numbers of its
        own, and what does.

    Raises:
        ConfigurationError: a number outside its range, or no output table where one is needed.
    """
    check_range("`weight_decay`", weight_decay, at_least=0)
    numbers = {"lr": lr, "table_lr": table_lr, "table_weight_decay": table_weight_decay}
    for name, value in numbers.items():
        check_range(f"`{name}`", value, at_least=0, optional=True)
    apart = table_lr is not None or table_weight_decay is not None
    of_table = {id(parameter) for parameter in _table_parameters(model)} if apart else set()
    decaying = {id(parameter) for parameter in decaying_parameters(without_wrappers(model))}
    parts: Dict[Any, List[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            key = (id(parameter) in of_table, id(parameter) in decaying)
            parts.setdefault(key, []).append(parameter)
    groups = []
    for (is_table, decays), parameters in sorted(parts.items(), key=lambda item: item[0]):
        rate = table_lr if is_table and table_lr is not None else lr
        own_decay = is_table and table_weight_decay is not None
        decay = table_weight_decay if own_decay else weight_decay
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
        return list(layer.stored_table.parameters())  # fully_shard may have split them
    weight: Any = layer.weight
    named = dict(layer.named_parameters())
    if any(parameter is weight for parameter in named.values()):
        return [weight]
    # Parametrizations, spectral_norm and prune of torch compute it from others.
    return [parameter for name, parameter in named.items() if name != "bias"]
