"""Replace factored tables of a stored model by one matrix each; the model is not built."""

from __future__ import annotations

from typing import Dict, List, Mapping, Tuple

from torch import Tensor

from spectral_fairseq.embeddings.entries import (
    dense_form,
    entries_by_module,
    factored_kind,
    same_table,
)
from spectral_fairseq.errors import NoEquivalentError

# What plain fairseq itself stores for a table and for an output layer.
PLAIN_ENTRIES = (frozenset({"weight"}), frozenset({"weight", "bias"}))


def collapse_tables(model: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """Replace every factored table by one matrix under plain fairseq's name.

    Returns:
        A new mapping. Collapsed tables are float32 even if ``model`` is float16: rounding the
        product once more would change the logits. Tables that are shared stay shared, and all
        other tensors stay as they are.

    Raises:
        UnsupportedError: an embedding or output layer stored in a way that plain fairseq does
            not have.
    """
    collapsed: Dict[str, Tensor] = {}
    products: List[Tuple[Mapping[str, Tensor], Tensor]] = []
    for name, entries in entries_by_module(model).items():
        kind = factored_kind(entries)
        if kind is None:
            for entry, tensor in entries.items():
                collapsed[f"{name}.{entry}" if name else entry] = tensor
            continue
        # fairseq copies a shared table once for each of its names when it trains on a GPU.
        product = next((dense for other, dense in products if same_table(entries, other)), None)
        if product is None:
            product = dense_form(kind, entries).float().contiguous()
            products.append((entries, product))
        collapsed[f"{name.removesuffix('.table')}.weight"] = product  # as a head holds it
    unknown = _not_plain(collapsed)
    if unknown:
        wanted = "embeddings and output layers that equal one matrix each"
        raise NoEquivalentError(wanted, f"the entries {', '.join(unknown)}")
    return collapsed


def _not_plain(model: Mapping[str, Tensor]) -> List[str]:
    places = ("embed_tokens", "output_projection")
    return [
        f"{module}.{entry}"
        for module, entries in entries_by_module(model).items()
        if any(place in module.split(".") for place in places)
        and frozenset(entries) not in PLAIN_ENTRIES
        for entry in entries
    ]
