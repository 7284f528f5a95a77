"""New vectors for rows of a table that training never reached.

Such a row is zero, or still has the values of its start. In an output layer it takes part in every
softmax, and one long row shapes the gradient of a whole step. The usual remedy, which libraries
also use for the rows of new words (Hewitt, 2021,
https://nlp.stanford.edu/~johnhew/vocab-expansion.html), is the mean vector of the other rows with a
small noise:

    w_i <- mean + share * (standard deviation of each column) * N(0, 1)
"""

from __future__ import annotations

import math
from typing import Optional, Sequence

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError, check_choice, check_enough, check_range
from spectral_fairseq.functional.products import row_lengths
from spectral_fairseq.functional.rows import (
    OUTLYING,
    length_scores,
    untrained_rows,
    zero_rows,
)

CHOICES = ("untrained", "zero", "initial", "long")
"""Rows by name: what ``analyze`` finds untrained, zero, of their initial length, outliers."""
FILLS = ("mean", "normal", "zero")
"""The new rows: the mean with a small noise, drawn like a trained row, or zero."""
NOISE = 0.01
# Of the length of a row of d independent normal numbers, 1 / sqrt(2 d) is the relative spread.
_SPREADS = 3.0


@torch.no_grad()
def rows_to_repair(
    matrix: Tensor,
    choices: Sequence[str] = ("untrained",),
    excluded: Optional[Tensor] = None,
    initial_length: Optional[float] = None,
) -> Tensor:
    """The rows of a table that some rules name.

    ``untrained`` names what :func:`~spectral_fairseq.functional.rows.untrained_rows` does: zero,
    equal to another row, or unusually short. ``long`` names rows whose logarithmic length lies five
    robust standard deviations above the median; ``initial`` those within three spreads of normal
    rows of ``initial_length``.

    Args:
        matrix: W, shape (N, d), of any floating dtype.
        choices: names of :data:`CHOICES`.
        excluded: rows that are left alone and not counted, shape (m,).
        initial_length: length with which rows began, for ``initial``.

    Returns:
        Indices in ascending order, shape (n,).

    Raises:
        ConfigurationError: another name, or no ``initial_length`` for ``initial``.
        DataError: ``matrix`` is no table.
    """
    check_enough(len(choices), 1, "name in `rows`", "Give one.", ConfigurationError)
    for name in choices:
        check_choice("each of `rows`", name, CHOICES)
    lacks = "initial" in choices and not (initial_length or 0) > 0
    if lacks or not math.isfinite(initial_length or 0):
        raise ConfigurationError(
            "`initial_length`, a finite number > 0, for the rows `initial`",
            f"{initial_length}",
            "Give the length of a new row: 1 in fairseq, 0.02 sqrt(d) in many models of "
            "transformers.",
        )
    counted = torch.ones(len(matrix), dtype=torch.bool, device=matrix.device)
    if excluded is not None:
        counted[excluded] = False
    places = counted.nonzero().squeeze(1)
    rows = matrix[places]
    norms = row_lengths(rows.float())
    found = torch.zeros(len(rows), dtype=torch.bool, device=matrix.device)
    if "untrained" in choices:
        found[untrained_rows(rows, norms)] = True
    if "zero" in choices:
        found |= zero_rows(norms)
    if "long" in choices:
        found |= length_scores(norms) > OUTLYING
    if "initial" in choices and initial_length is not None:
        away = (norms.double() / initial_length - 1).abs()
        found |= away < _SPREADS / math.sqrt(2 * rows.size(1))
    return places[found]


@torch.no_grad()
def new_rows(
    matrix: Tensor,
    rows: Tensor,
    fill: str = "mean",
    noise: float = NOISE,
    excluded: Optional[Tensor] = None,
    seed: int = 1,
) -> Tensor:
    """The vectors that :data:`FILLS` gives to rows of a table, which is not changed.

    Args:
        matrix: W, shape (N, d), of any floating dtype.
        rows: to get new vectors, shape (n,).
        fill: name of :data:`FILLS`.
        noise: share of each column's standard deviation, for ``mean``; at least 0.
        excluded: further rows that do not count for the mean, shape (m,).
        seed: of the noise.

    Returns:
        Shape (n, d), float32, or float64 if ``matrix`` is.

    Raises:
        ConfigurationError: another fill, a negative noise, or fewer than two rows to learn from.
    """
    check_choice("`fill`", fill, FILLS)
    check_range("`noise`", noise, at_least=0)
    kept = torch.ones(len(matrix), dtype=torch.bool, device=matrix.device)
    kept[rows] = False
    if excluded is not None:
        kept[excluded] = False
    check_enough(
        int(kept.sum()),
        2,
        "trained rows, whose mean the others get",
        "Choose fewer rows, or another table.",
        ConfigurationError,
    )
    known = matrix[kept].to(torch.promote_types(matrix.dtype, torch.float32))
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(len(rows), matrix.size(1), generator=generator, dtype=torch.float64)
    share = {"mean": noise, "normal": 1.0, "zero": 0.0}[fill]
    spread = share * known.std(0, unbiased=False)
    made = known.mean(0) * (fill != "zero") + spread * drawn.to(known)
    return made
