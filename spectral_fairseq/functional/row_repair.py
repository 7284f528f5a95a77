"""New vectors for rows of a table that training never reached.

Such a row is zero, or still has the values of its start. In an output layer it takes part in
every softmax, and one long row shapes the gradient of a whole step. The usual remedy, which
libraries also use for the rows of new words (Hewitt, 2021,
https://nlp.stanford.edu/~johnhew/vocab-expansion.html), is the mean vector of the other rows with
a small noise:

    w_i <- mean + share * (standard deviation of each column) * N(0, 1)

Rows that are far longer than the others (:data:`OUTLYING`) count for neither, since one of them
can be most of a mean.
"""

from __future__ import annotations

import math
from typing import Optional, Sequence

import torch
from torch import Tensor

from spectral_fairseq.errors import (
    ConfigurationError,
    check_choice,
    check_count,
    check_enough,
    check_range,
    listed,
)
from spectral_fairseq.functional.precision import widened
from spectral_fairseq.functional.robust_scores import OUTLYING, length_scores, zero_rows
from spectral_fairseq.functional.row_blocks import (
    check_finite,
    rows_outside,
)
from spectral_fairseq.functional.row_norms import row_lengths
from spectral_fairseq.functional.untrained_rows import untrained_rows

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

    ``untrained`` names what :func:`~.untrained_rows.untrained_rows` does: zero,
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
        DataError: ``matrix`` is no table, or has infinity or NaN in it.
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
    check_finite(matrix, "the table")
    places = rows_outside(len(matrix), excluded, matrix.device).nonzero().squeeze(1)
    rows = matrix[places]
    norms = row_lengths(rows.float())
    chosen = torch.zeros(len(rows), dtype=torch.bool, device=matrix.device)
    if "untrained" in choices:
        chosen[untrained_rows(rows, norms)] = True
    if "zero" in choices:
        chosen |= zero_rows(norms)
    if "long" in choices:
        chosen |= length_scores(norms) > OUTLYING
    if "initial" in choices and initial_length is not None:
        away = (norms.double() / initial_length - 1).abs()
        chosen |= away < _SPREADS / math.sqrt(2 * rows.size(1))
    return places[chosen]


@torch.no_grad()
def new_rows(
    matrix: Tensor,
    rows: Tensor,
    fill: str = "mean",
    noise: float = NOISE,
    excluded: Optional[Tensor] = None,
    seed: int = 1,
    pieces: Optional[Sequence[Sequence[int]]] = None,
) -> Tensor:
    """The vectors that :data:`FILLS` gives to rows of a table, which is not changed.

    Args:
        matrix: W, shape (N, d), of any floating dtype.
        rows: to get new vectors, shape (n,).
        fill: name of :data:`FILLS`.
        noise: share of each column's standard deviation, for ``mean``; at least 0.
        excluded: further rows that do not count for the mean, shape (m,).
        seed: of the noise.
        pieces: for each of ``rows`` the rows whose mean takes the place of that of all others,
            such as those of a new word's subwords.

    Returns:
        Shape (n, d), float32, or float64 if ``matrix`` is.

    Raises:
        ConfigurationError: another fill, a negative noise, fewer than two rows to learn from, or
            pieces that are no such rows.
        DataError: infinity or NaN in ``matrix``.
    """
    check_choice("`fill`", fill, FILLS)
    check_range("`noise`", noise, at_least=0)
    check_finite(matrix, "the table")
    kept = rows_outside(len(matrix), excluded, matrix.device)
    kept[rows] = False
    check_enough(
        int(kept.sum()),
        2,
        "trained rows, whose mean the others get",
        "Choose fewer rows, or another table.",
        ConfigurationError,
    )
    known = widened(matrix[kept])
    known = known[length_scores(row_lengths(known.float())) <= OUTLYING]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(
        len(rows), matrix.size(1), generator=generator, dtype=torch.float64, device="cpu"
    )
    share = {"mean": noise, "normal": 1.0, "zero": 0.0}[fill]
    spread = share * known.std(0, unbiased=False)
    middle = known.mean(0)
    if pieces is not None:
        remedy = "Name the subwords of each new row."
        check_count(len(pieces), len(rows), "lists of subwords, one for each row", remedy)
        middle = _means_of_pieces(matrix, kept, pieces).to(known)
    return middle * (fill != "zero") + spread * drawn.to(known)


def _means_of_pieces(matrix: Tensor, kept: Tensor, pieces: Sequence[Sequence[int]]) -> Tensor:
    """The mean vector of each list of rows, shape (n, d)."""
    means = []
    for one in pieces:
        check_enough(len(one), 1, "subword of each new row", "Name some.", ConfigurationError)
        for row in one:
            check_range("each of the subwords", row, at_least=0, below=len(matrix), whole=True)
        places = torch.tensor([*one], device=matrix.device)
        if not bool(kept[places].all()):
            raise ConfigurationError(
                "subwords that are trained rows",
                f"some of {listed([*one])} among the rows that are filled or left out",
                "Tokenise the new words with the old tokenizer.",
            )
        means.append(widened(matrix[places]).mean(0))
    return torch.stack(means)
