"""Repair of the tables of a model in memory: rows that training never reached."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence

import torch
from torch import Tensor, nn

from spectral_fairseq.functional.rows import NOISE, new_rows, rows_to_repair
from spectral_fairseq.training.modules import (
    check_table,
    excluded_rows,
    output_layer,
    without_wrappers,
)


def repair_(
    model: nn.Module,
    *,
    rows: Sequence[str] = ("untrained",),
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
            ``initial`` (of their initial length), ``long`` (outliers).
        fill: ``mean`` of the other rows with a small noise, ``normal`` (drawn like one of them) or
            ``zero``.
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
        UnsupportedError: a table of 16 bits, quantised, or split over devices.
    """
    found: Dict[str, List[int]] = {}
    planned = []
    for name, weight, padding in _tables(model):
        check_table(weight, "repair_")
        left_out = list(padding) if excluded is None else list(excluded)
        chosen = torch.tensor(
            excluded_rows(left_out, len(weight)), dtype=torch.long, device=weight.device
        )
        places = rows_to_repair(weight.detach(), rows, chosen, initial_length)
        found[name] = places.tolist()
        if len(places):
            made = new_rows(weight.detach(), places, fill, noise, chosen, seed)
            planned.append((weight, places, made))
    with torch.no_grad():
        for weight, places, made in planned:
            weight[places] = made.to(weight.dtype)
    return found


def _tables(model: nn.Module) -> List[tuple[str, Tensor, List[int]]]:
    """The different tables of a model: name, weight, and the rows of padding of its look-ups."""
    inner = without_wrappers(model)
    out = output_layer(model)
    inputs = getattr(inner, "get_input_embeddings", lambda: None)()
    weights: Dict[int, Tensor] = {}
    for layer in (inputs, out):
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            weights.setdefault(id(weight), weight)
    found = []
    for weight in weights.values():
        users = [
            (name, layer)
            for name, layer in inner.named_modules()
            if getattr(layer, "_parameters", {}).get("weight") is weight
        ]
        padding = [
            layer.padding_idx
            for _, layer in users
            if isinstance(layer, nn.Embedding) and layer.padding_idx is not None
        ]
        name = users[0][0] if users else ""
        found.append((f"{name}.weight".lstrip("."), weight, padding))
    return found
