"""New vectors for rows of a model's tables that no training has reached, or that a user names."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

import torch
from torch import Tensor, nn

from spectral_fairseq.errors import ConfigurationError, check_enough, check_range
from spectral_fairseq.functional.row_repair import NOISE, new_rows, rows_to_repair
from spectral_fairseq.training.output_layer import output_layer, without_wrappers
from spectral_fairseq.training.table_checks import (
    check_has_values,
    check_not_sharded,
    check_table,
    excluded_rows,
)


def repair_(
    model: nn.Module,
    *,
    rows: Union[Sequence[str], Sequence[int], Mapping[int, Sequence[int]]] = ("untrained",),
    fill: str = "mean",
    noise: float = NOISE,
    initial_length: Optional[float] = None,
    excluded: Optional[Sequence[int]] = None,
    seed: int = 1,
) -> Dict[str, List[int]]:
    """Give rows of the input and output tables that look untrained new vectors, in place.

    Args:
        model: of transformers, or any other with an output layer; a layer has one table.
        rows: which ones: ``untrained`` (zero, equal to another row, or unusually short), ``zero``,
            ``initial`` (of their initial length), ``long`` (outliers). Or their indices, as after a
            vocabulary has grown; or a dictionary from these to the rows of each new word's subwords
            in the old tokenizer, whose mean it then gets.
        fill: ``mean`` of the other rows with a small noise, without those that are far longer;
            ``normal`` (drawn like one of them) or ``zero``.
        noise: share of each column's standard deviation, for ``mean``.
        initial_length: length of a new row, for ``initial``.
        excluded: rows that are left alone and not counted. ``None`` takes ``padding_idx`` of the
            look-ups.
        seed: of the noise.

    Returns:
        name of each different table -> rows that were changed.

    Raises:
        ConfigurationError: no output layer, an unknown choice, a table that is frozen or computed
            from other parameters.
        UnsupportedError: a table of 16 bits, quantised, on the device meta, split over devices, or
            of a model that DeepSpeed has taken.
    """
    changed_rows: Dict[str, List[int]] = {}
    planned = []
    inner = without_wrappers(model)
    for name, weight in _tables(model).items():
        check_not_sharded(weight)
        check_table(weight, "repair_", inner)
        check_has_values(weight, "repair_")
        left_out = excluded_rows(excluded, inner, weight)
        chosen = torch.tensor(left_out, dtype=torch.long, device=weight.device)
        named = _named_rows(rows, len(weight))
        if named is None:
            places = rows_to_repair(weight.detach(), rows, chosen, initial_length)  # type: ignore
        else:
            places = torch.tensor(named, dtype=torch.long, device=weight.device)
        changed_rows[name] = places.tolist()
        if len(places):
            pieces = [rows[row] for row in named or ()] if isinstance(rows, Mapping) else None
            made = new_rows(weight.detach(), places, fill, noise, chosen, seed, pieces)
            planned.append((weight, places, made))
    with torch.no_grad():
        for weight, places, made in planned:
            weight[places] = made.to(weight.dtype)
    return changed_rows


def _named_rows(rows: Any, count: int) -> Optional[List[int]]:
    """The indices that a user gives; ``None`` for names of :data:`~.row_repair.CHOICES`.

    Raises:
        ConfigurationError: a table of ``count`` rows does not have them.
    """
    if isinstance(rows, str):
        wanted = "`rows` as a sequence of names or of indices"
        raise ConfigurationError(wanted, f"the text {rows!r}", f"Pass ({rows!r},).")
    if not isinstance(rows, Mapping) and any(isinstance(row, str) for row in rows):
        return None
    check_enough(len(rows), 1, "row in `rows`", "Name some.", ConfigurationError)
    for row in rows:
        check_range("each of `rows`", row, at_least=0, below=count, whole=True)
    return [int(row) for row in rows]


def _tables(model: nn.Module) -> Dict[str, Tensor]:
    """The different tables of a model by the name of the first layer that has each."""
    inner = without_wrappers(model)
    out = output_layer(model)
    tables: Dict[str, Tensor] = {}
    for layer in (getattr(inner, "get_input_embeddings", lambda: None)(), out):
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            users = (n for n, m in inner.named_modules() if m._parameters.get("weight") is weight)
            tables[f"{next(users, '')}.weight".lstrip(".")] = weight
    return tables
