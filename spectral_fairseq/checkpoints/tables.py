"""From a checkpoint to the table of word vectors that is to be measured.

A table is stored as one matrix (plain), as U, sigma and V (:mod:`embeddings.svd`) or as lengths
and directions (:mod:`embeddings.weight_norm`). Shared tables are stored once a name; one is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.checkpoints.collapse import (
    PADDING_ROW,
    SVD_ENTRIES,
    WEIGHT_NORM_ENTRIES,
    entries_by_module,
)
from spectral_fairseq.embeddings.svd import V_SCALE
from spectral_fairseq.embeddings.weight_norm import SHORTEST
from spectral_fairseq.errors import CheckpointError, ConfigurationError, DataError
from spectral_fairseq.functional.linalg.gram import gram
from spectral_fairseq.functional.penalties.orthogonality import (
    frobenius_defect,
    identity_residual,
    spectral_defect,
)

# Modules under which fairseq's models keep look-up tables and output layers over words.
PLACES = frozenset(
    ("embed_tokens", "output_projection", "fc_out", "fc3", "embed_out", "embed_in", "lm_head")
    + ("word_emb", "word_embeddings", "wte")
)  # fmt: skip

# What our mixtures keep beside their table: heads/mixture.py.
MIXTURE_PARTS = ("output_projection.prior", "output_projection.latent")

_BLOCK_ROWS = 16384


@dataclass
class Table:
    """A table of word vectors, without the rows that stand for no word.

    Attributes:
        name: module that holds it in the checkpoint.
        names: all modules that hold it, ``name`` first.
        kind: ``plain``, ``svd`` or ``weight-norm``.
        weight: W, shape (N, d): the rows that count, float32 (float64 where stored so).
        rows: of each row of ``weight`` its row in the checkpoint, shape (N,).
        stored_rows: rows in the checkpoint.
        dtype: in which it is stored.
        orthogonality: of an SVD table, distances of U and V from orthonormal columns, Frobenius
            and spectral.
        stored_sigma: of an SVD table, |sigma| as learned, largest first, shape (d,).
        initial_norm: of an SVD table, the norm an automatic c1 refers to.
    """

    name: str
    names: List[str]
    kind: str
    weight: Tensor
    rows: Tensor
    stored_rows: int
    dtype: str
    orthogonality: Dict[str, float] = field(default_factory=dict)
    stored_sigma: Optional[Tensor] = None
    initial_norm: Optional[float] = None


def find_tables(model: Mapping[str, Tensor]) -> Dict[str, List[str]]:
    """Tables over words in a checkpoint's ``model``.

    Returns:
        For each different table the names of the modules that hold it, in the checkpoint's order.
        Two modules hold the same table if they share memory or their values are equal.
    """
    found: Dict[str, List[str]] = {}
    for module, entries in entries_by_module(model).items():
        main = _main_entry(entries, module)
        if main is None or not PLACES & set(f"{module}.{main}".split(".")):
            continue
        if module.endswith(MIXTURE_PARTS):
            continue
        name = module if PLACES & set(module.split(".")) else f"{module}.{main}"
        for first in found:
            if _same_table(model, first, name):
                found[first].append(name)
                break
        else:
            found[name] = [name]
    return found


def choose_table(model: Mapping[str, Tensor], wanted: Optional[str], path: Any) -> List[str]:
    """The names of the one table to measure.

    Args:
        model: name -> tensor.
        wanted: value of ``--table``: a module's name, or a part that fits one table only; any
            matrix of the model can be had by its full name. None: the only table there is.
        path: of the checkpoint, for messages.

    Returns:
        Modules that hold it; the first is the one to read.

    Raises:
        CheckpointError: no table found, none fits, or several do.
    """
    tables = find_tables(model)
    fitting = list(tables.values())
    if wanted is not None:
        exact = wanted[: -len(".weight")] if wanted.endswith(".weight") else wanted
        fitting = [names for names in tables.values() if exact in names]
        if not fitting and _entries_of(model, exact) is not None:
            return [exact]
        if not fitting:
            fitting = [names for names in tables.values() if any(wanted in name for name in names)]
    if len(fitting) == 1:
        return fitting[0]
    listed = "; ".join(_describe(model, names) for names in tables.values()) or "none"
    if not tables:
        matrices = [key for key, value in model.items() if value.dim() == 2]
        raise CheckpointError(
            f"a table of word vectors in {path}",
            f"{len(model)} tensors, none in a module named {', '.join(sorted(PLACES))}",
            "If the model has one under another name, give it with --table NAME; its matrices "
            f"are {', '.join(matrices[:8]) or 'none'}{', ...' if len(matrices) > 8 else ''}.",
        )
    if not fitting:
        raise CheckpointError(
            f"a table {wanted!r} in {path}", listed, "Give one of these with --table NAME."
        )
    raise CheckpointError(
        f"one table to measure in {path}", f"{len(fitting)}: {listed}",
        "Choose one with --table NAME.",
    )  # fmt: skip


def table_shape(model: Mapping[str, Tensor], name: str) -> Tuple[int, int]:
    """Rows and dimensions of a table by the name that :func:`choose_table` gave.

    Raises:
        ConfigurationError: it is no matrix.
    """
    entries = _entries_of(model, name)
    if entries is None:
        raise ConfigurationError(
            "--table to name a matrix", name, "Give a module that holds word vectors."
        )
    rows, dim = entries[_STORED_ROWS[_kind(entries)]].shape
    return rows, dim


def extract_table(
    model: Mapping[str, Tensor],
    path: Any,
    wanted: Optional[str] = None,
    excluded: Optional[Sequence[int]] = None,
) -> Table:
    """Read one table.

    Args:
        model: name -> tensor; not changed.
        path: of the checkpoint, for messages.
        wanted: as for :func:`choose_table`.
        excluded: rows that stand for no word; fairseq's padding row if not given.

    Returns:
        The table.

    Raises:
        CheckpointError: as for :func:`choose_table`.
        DataError: fewer words than dimensions, or entries that are not finite.
        ConfigurationError: the chosen entry is no matrix.
    """
    names = choose_table(model, wanted, path)
    stored_rows, dim = table_shape(model, names[0])
    entries = _entries_of(model, names[0]) or {}
    kind = _kind(entries)
    left_out = torch.tensor(sorted(set([PADDING_ROW] if excluded is None else excluded)))
    if len(left_out) and int(left_out.max()) >= stored_rows:
        left_out = left_out[left_out < stored_rows]
    counted = torch.ones(stored_rows, dtype=torch.bool)
    counted[left_out] = False
    rows = counted.nonzero().squeeze(1)
    if len(rows) < dim:
        raise DataError(
            f"at least as many words as dimensions (N >= d) in {names[0]} of {path}",
            f"N = {len(rows)} words, padding and made-up rows left out, and d = {dim}",
            "If the matrix is no table of words, choose another with --table NAME.",
        )
    table = Table(
        name=names[0],
        names=names,
        kind=kind,
        weight=_DENSE[kind](entries, rows),
        rows=rows,
        stored_rows=stored_rows,
        dtype=str(entries[_STORED_ROWS[kind]].dtype).replace("torch.", ""),
    )
    if not torch.isfinite(table.weight.sum(0)).all():
        # Sums find what is not finite without a mask as large as the table.
        broken = int((~torch.isfinite(table.weight).all(1)).sum())
        if broken:
            raise DataError(
                f"finite numbers in {table.name} of {path}",
                f"infinity or NaN in {broken} of {len(rows)} rows",
                "Training diverged, or the file is damaged: take an earlier checkpoint.",
            )
    if kind == "svd":
        _measure_factors(table, entries, left_out)
    return table


def _measure_factors(table: Table, entries: Mapping[str, Tensor], excluded: Tensor) -> None:
    scale = entries["scale"].float()
    for name, gram_matrix in (
        ("u", gram(entries["U"].float(), excluded) / scale.square()),
        ("v", gram(entries["V"].float()) / V_SCALE**2),
    ):
        residual = identity_residual(gram_matrix.double())
        table.orthogonality[f"{name}_frobenius"] = float(frobenius_defect(residual).sqrt())
        table.orthogonality[f"{name}_spectral"] = float(spectral_defect(residual).sqrt())
    sigma = entries["sigma"].float() * scale
    table.stored_sigma = sigma.abs().sort(descending=True).values.double()
    table.initial_norm = float(entries["initial_norm"])


def _plain(entries: Mapping[str, Tensor], rows: Tensor) -> Tensor:
    return _at_least_float32(entries["weight"][rows])


def _svd(entries: Mapping[str, Tensor], rows: Tensor) -> Tensor:
    """W = (U' sigma') (V'/v)', block by block; see Note [Scales of the factors]."""
    right = (entries["sigma"].unsqueeze(1).double() * entries["V"].t().double() / V_SCALE).float()
    weight = torch.empty(len(rows), right.size(1))
    for chosen, block in zip(rows.split(_BLOCK_ROWS), weight.split(_BLOCK_ROWS)):
        torch.mm(entries["U"][chosen].float(), right, out=block)
    return weight


def _weight_norm(entries: Mapping[str, Tensor], rows: Tensor) -> Tensor:
    """W_k = g_k v_k / ||v_k||, a zero v_k giving a zero row."""
    weight = _at_least_float32(entries["v"][rows])
    lengths = torch.linalg.vector_norm(weight, dim=1).clamp(min=SHORTEST)
    return weight.mul_((entries["g"][rows].to(weight.dtype) / lengths).unsqueeze(1))


def _at_least_float32(matrix: Tensor) -> Tensor:
    return matrix if matrix.dtype == torch.float64 else matrix.float()


# kind -> the dense rows of its entries, and the entry with a row for every word.
_DENSE: Dict[str, Callable[[Mapping[str, Tensor], Tensor], Tensor]] = {
    "plain": _plain,
    "svd": _svd,
    "weight-norm": _weight_norm,
}
_STORED_ROWS = {"plain": "weight", "svd": "U", "weight-norm": "v"}


def _kind(entries: Mapping[str, Tensor]) -> str:
    if SVD_ENTRIES <= set(entries):
        return "svd"
    return "weight-norm" if WEIGHT_NORM_ENTRIES <= set(entries) else "plain"


def _main_entry(entries: Mapping[str, Tensor], module: str) -> Optional[str]:
    """The entry of a module that makes it a table; bare parameters have names of their own."""
    if SVD_ENTRIES <= set(entries):
        return "U"
    if WEIGHT_NORM_ENTRIES <= set(entries) and entries["v"].dim() == 2:
        return "v"
    if "weight" in entries and entries["weight"].dim() == 2:
        return "weight"
    bare = [entry for entry, value in entries.items() if entry in PLACES and value.dim() == 2]
    return bare[0] if bare else None


def _entries_of(model: Mapping[str, Tensor], name: str) -> Optional[Dict[str, Tensor]]:
    """Entries of a module, or a bare matrix as ``{"weight": matrix}``; None if there is neither."""
    if name in model:
        return {"weight": model[name]} if model[name].dim() == 2 else None
    entries = entries_by_module(model).get(name, {})
    main = _main_entry(entries, name)
    return dict(entries) if main in ("U", "v", "weight") else None


def _same_table(model: Mapping[str, Tensor], a: str, b: str) -> bool:
    one, other = _entries_of(model, a) or {}, _entries_of(model, b) or {}
    kind = _kind(one)
    if kind != _kind(other):
        return False
    parts = {"svd": ("U", "sigma", "V"), "weight-norm": ("g", "v"), "plain": ("weight",)}[kind]
    for part in parts:
        x, y = one[part], other[part]
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        # Training on a GPU, and tools that rewrite checkpoints, store shared tables apart.
        if x.data_ptr() != y.data_ptr() and not torch.equal(x, y):
            return False
    return True


def _describe(model: Mapping[str, Tensor], names: List[str]) -> str:
    kind = _kind(_entries_of(model, names[0]) or {})
    rows, dim = table_shape(model, names[0])
    shared = f" (= {', '.join(names[1:])})" if names[1:] else ""
    return f"{names[0]}{shared}, {kind}, {rows} x {dim}"
