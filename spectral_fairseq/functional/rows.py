"""Rows of a table that stand out: unusual lengths, rows that training never reached, their repair.

The statistics of two values for each row, such as its length and its count, are here too.
"""

from __future__ import annotations

import math
from typing import List, Optional, Sequence

import torch
from torch import Tensor

from spectral_fairseq.errors import (
    ConfigurationError,
    check_choice,
    check_enough,
    check_range,
    listed,
)
from spectral_fairseq.functional.precision import widened
from spectral_fairseq.functional.row_blocks import (
    cached_rows,
    check_finite,
    checked_table,
    rows_outside,
)
from spectral_fairseq.functional.row_norms import SMALLEST_SHARE, row_lengths

# How far values lie from the middle of their sample, in a unit that outliers cannot change.
#
#     score_i = (x_i - median(x)) / (1.4826 median |x - median(x)|)
#
# The factor makes the unit the standard deviation of a normal sample. :data:`OUTLYING` is 5: a
# normal value lies that far on one side with probability 2.9e-7, so of a million none is expected.


OUTLYING = 5.0


def robust_scores(values: Tensor) -> Tensor:
    """Return the scores, shape (n,), float64, of ``values``, shape (n,).

    All are zero where at least half of the values are equal, which leaves no unit.
    """
    away = values.double() - values.double().median()
    unit = 1.4826 * float(away.abs().median())
    return away / unit if unit > 0 else torch.zeros_like(away)


def zero_rows(norms: Tensor) -> Tensor:
    """Return which rows count as zero beside the longest, shape (n,), bool, from their norms."""
    return norms <= SMALLEST_SHARE * norms.max() if norms.numel() else norms <= 0


def length_scores(norms: Tensor) -> Tensor:
    """Return :func:`robust_scores` of log ||w_i||, shape (n,), float64; zero rows as short ones."""
    wide = norms.double()
    longest = float(wide.max()) if wide.numel() else 0.0
    if longest == 0:
        return torch.zeros_like(wide)
    return robust_scores((wide / longest).clamp(min=SMALLEST_SHARE).log())


# Rows of a table that look as if training had never reached them.
#
# Land, Bartolo: "Fishing for Magikarp: Automatically Detecting Under-trained Tokens in Large
# Language Models", EMNLP 2024, https://arxiv.org/abs/2405.05417, ranks tokens by the norm of their
# input vectors, because weight decay shrinks a row that no gradient reaches. A report needs a rule
# that decides. This one calls a row never trained if
#
# 1. it is zero; or
# 2. it equals another row bit for bit, which two gradients never bring about; or
# 3. its norm is unusually small: log ||w_i|| lies 5 robust standard deviations
#    (see above) below the median.
#
# The third rule is blind where half of the rows or more are untrained, and where the initialisation
# is as long as trained rows. A row that a tied softmax only pushed away counts as trained.


# Two for a number of 8 bytes: its low bits are often zero, and would stay so in a product.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int32}
# Rows that differ nearly always differ in so many first columns.
_FIRST_COLUMNS = 16


@torch.no_grad()
def untrained_rows(matrix: Tensor, norms: Tensor) -> Tensor:
    """Return the rows that the three rules above name.

    Args:
        matrix: W, shape (N, d), of any floating dtype.
        norms: of its rows, shape (N,).

    Returns:
        Indices in ascending order, shape (m,).

    Raises:
        DataError: ``matrix`` is not a table.
    """
    zero, scores = zero_rows(norms), length_scores(norms)
    short = scores < -OUTLYING
    return (zero | short | repeated_rows(matrix)).nonzero().squeeze(1)


@torch.no_grad()
def repeated_rows(matrix: Tensor, *, block_rows: Optional[int] = None) -> Tensor:
    """Return whether another row has the same bits, shape (N,), bool.

    The bits of each row are hashed to 64 bits, in integers, which no order of summation changes.
    Different rows share a hash with a probability of about 1e-9 in a table of 100,000 words. Whole
    rows are read only where the first columns are repeated.

    Args:
        matrix: W, shape (N, d), of a floating dtype of 2, 4 or 8 bytes.
        block_rows: rows that are hashed at a time; as many as stay in the cache if not given.

    Raises:
        DataError: ``matrix`` is not a table.
    """
    matrix = checked_table(matrix)
    block_rows = block_rows or cached_rows(matrix.size(1))
    repeated = _occurs_again([_hashes(matrix[:, :_FIRST_COLUMNS])])
    rows = repeated.nonzero().squeeze(1)
    if rows.numel() > 0:
        repeated[rows] = _occurs_again([_hashes(matrix[part]) for part in rows.split(block_rows)])
    return repeated


def _hashes(rows: Tensor) -> Tensor:
    bits = rows.contiguous().view(_INTEGERS[rows.element_size()])
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (bits.size(1),), generator=generator) * 2 + 1
    return (bits.long() * factors.to(rows.device)).sum(1)  # mod 2^64


def _occurs_again(hashes: List[Tensor]) -> Tensor:
    _, place, times = torch.unique(torch.cat(hashes), return_inverse=True, return_counts=True)
    return (times > 1)[place]


def pearson(x: Tensor, y: Tensor) -> float:
    """Return Pearson's r of two vectors, shape (n,); NaN where one of them is constant."""
    x, y = _centred(x), _centred(y)
    scale = float(x.norm() * y.norm())
    return float(x @ y) / scale if scale > 0 else float("nan")


def slope(x: Tensor, y: Tensor) -> float:
    """Return the slope of the least-squares line of y over x; NaN where x is constant."""
    x, y = _centred(x), _centred(y)
    spread = float(x @ x)
    return float(x @ y) / spread if spread > 0 else float("nan")


def _centred(x: Tensor) -> Tensor:
    x = x.double() - x[:1].double()  # exactly zero for a constant, whatever its mean is rounded to
    return x - x.mean()


# Whether a table has been trained, or is as an initialisation left it.
#
# Initialisations draw the numbers of a table independently, around zero and at one scale. The
# lengths of N rows of d normal numbers then have the relative spread 1 / sqrt(2 d), those of
# uniform ones less, and with e_i = w_i / ||w_i|| the number || sum_i e_i ||^2 / N is 1 on average,
# with the standard deviation sqrt(2 / d). Training makes rows of frequent words longer or shorter,
# and gives all rows a common direction, which soon is a hundred times what chance allows. The
# bounds lie eight standard deviations above chance, and beyond every usual initialisation
# (normal, uniform, truncated, orthogonal). A table that was centred and whose rows have equal
# lengths is not recognised, and one that has taken a few small steps is not either.

_DRAWN_SPREAD = 2.5
_DRAWN_DEVIATIONS = 8.0


@torch.no_grad()
def looks_trained(matrix: Tensor, excluded: Optional[Tensor] = None) -> bool:
    """Whether the rows of a table are unlike those that an initialisation draws.

    Args:
        matrix: W, shape (N, d), of any floating dtype, finite.
        excluded: rows that are not counted, shape (m,); rows of zeros are not either.
    """
    rows = matrix[rows_outside(len(matrix), excluded, matrix.device)]
    norms = row_lengths(rows.float()).double()
    rows, norms = rows[norms > 0], norms[norms > 0]
    if len(rows) < 2:
        return False
    dim = rows.size(1)
    spread = float((norms / norms.mean()).std())
    common = torch.mv(rows.double().t(), 1 / norms)  # sum_i e_i
    shared = float(common.square().sum()) / len(rows)
    return spread > _DRAWN_SPREAD / math.sqrt(
        2 * dim
    ) or shared > 1 + _DRAWN_DEVIATIONS * math.sqrt(2 / dim)


# New vectors for rows of a table that training never reached.
#
# Such a row is zero, or still has the values of its start. In an output layer it takes part in
# every softmax, and one long row shapes the gradient of a whole step. The usual remedy, which
# libraries also use for the rows of new words (Hewitt, 2021,
# https://nlp.stanford.edu/~johnhew/vocab-expansion.html), is the mean vector of the other rows with
# a small noise:
#
#     w_i <- mean + share * (standard deviation of each column) * N(0, 1)
#
# Rows that are far longer than the others (:data:`OUTLYING`) count for neither, since one of them
# can be most of a mean.

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
    drawn = torch.randn(len(rows), matrix.size(1), generator=generator, dtype=torch.float64)
    share = {"mean": noise, "normal": 1.0, "zero": 0.0}[fill]
    spread = share * known.std(0, unbiased=False)
    middle = known.mean(0)
    if pieces is not None:
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
