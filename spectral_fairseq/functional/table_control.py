"""Control of a table's true spectrum outside the optimiser, as AdamW does with weight decay.

Loshchilov and Hutter, ICLR 2019 (https://arxiv.org/abs/1711.05101), take weight decay out of the
loss, so that neither clipping nor Adam's second moment changes its strength. The same is done here
with the spectrum control of Wang et al., ICLR 2020 (https://openreview.net/forum?id=ByxY8CNtvr):

    W = U diag(sigma) V',   sigma_new = sigma + rate (target - sigma),
    W <- W V diag(sigma_new / sigma) V'

sigma and V come from the d x d Gram matrix, so that no decomposition of N x d is needed. For
``both``, which raises small values, it is computed in float64. Values below 8e-6 sigma_1 stay as
they are: the roundoff of a table in float32 makes such values in some thousand updates. A step to a
target of the same norm is a chord of a sphere and would shorten the table every time, so with a
free scale sigma_new of ``both`` is given the norm of sigma again. ``above`` cuts, so it shortens
the table, whatever the scale.

Centring takes the mean vector out likewise, w_i <- w_i - rate * mean
(https://arxiv.org/abs/2601.02031 for output embeddings): adding one vector to all output vectors
changes no softmax. Excluded rows keep their vectors, so the probabilities of words keep their
ratios, and only those of padding change.

A change is planned from the table and applied to it in two calls, so that one worker can plan for
all. The plan for a table that is not finite is not finite either, and is refused, by every worker,
before anything is written.

Flags: ``--spectrum-decay`` 0, ``--spectrum-side`` above, ``--spectrum-slack`` 3,
    ``--spectrum-scale`` free, ``--table-centering`` 0, ``--spectrum-decay-interval`` 10,
    ``--spectrum-decay-start`` 0.
In order: ``plugin/control_trainer.py: control_tables``, ``methods/control.py: ControlRule.plan``,
    ``plan_change``, ``functional/workers.py: Workers.share_change``, ``apply_change_``.
"""

from __future__ import annotations

import math
from typing import Callable, NamedTuple, Optional

import torch
from torch import Tensor

from spectral_fairseq.errors import check_choice, check_range
from spectral_fairseq.functional.gram import accumulate_gram, mirror_gram
from spectral_fairseq.functional.precision import at_least_float32, full_float32, widened
from spectral_fairseq.functional.row_norms import row_lengths
from spectral_fairseq.functional.spectra import (
    require_finite,
    right_singular_system_of_gram,
    roundoff,
)
from spectral_fairseq.functional.spectrum_penalty import check_prior, check_rank

SIDES = ("both", "above")
SCALES = ("fixed", "free")
SIDE, SLACK, SCALE = "above", 3.0, "free"  # where nothing else is asked for
# A block of rows and its product stay within a few ten MiB at any usual width.
CONTROL_ROWS = 8192
# Singular values below this share of the largest are not raised. One rounding of all entries makes
# some of half an eps, and independent ones add up like their root: these are 16,000 of float32. A
# Gram matrix in float64 knows their squares to a thousandth.
SMALLEST = 64 * torch.finfo(torch.float32).eps
# The roundoff of a row grows with the direction that grows most. Beyond this, float32 would lose
# more than 1e-5 of it.
MOST_IN_FLOAT32 = 100.0


class TableChange(NamedTuple):
    """What is to be done to a table: W <- (W - 1 shift') V diag(ratio) V'.

    Args:
        shift: shape (d,), subtracted from every row.
        ratio: shape (d,), by which the part along each direction grows; 1 for no change.
        vectors: V, shape (d, d), the directions as columns.
    """

    shift: Tensor
    ratio: Tensor
    vectors: Tensor

    def packed(self) -> Tensor:
        """One float64 tensor of shape (d + 2, d), to be sent to other workers."""
        return torch.cat([self.shift[None], self.ratio[None], self.vectors]).double()

    @classmethod
    def unpacked(cls, packed: Tensor) -> TableChange:
        """The change that :meth:`packed` made a tensor of."""
        return cls(packed[0], packed[1], packed[2:])

    def check(self) -> None:
        """Refuse a change that was planned from a table with infinity or NaN in it.

        Raises:
            DataError: it was.
        """
        require_finite(self.ratio, "a table")


def spectrum_target(sigma: Tensor, prior: Tensor, *, side: str, slack: float, scale: str) -> Tensor:
    """The singular values that a spectrum is moved to.

    Args:
        sigma: singular values, largest first, shape (d,).
        prior: likewise, shape (d,), positive.
        side: ``both`` moves every value to the prior; ``above`` moves what exceeds ``slack`` times
            the prior back to that bound, and leaves the rest where it is.
        slack: factor on the prior of ``above``, >= 1.
        scale: ``fixed`` takes the prior as it is; ``free`` gives it the norm of ``sigma``, so that
            it describes the shape alone. With a flat prior the bound of ``above`` is then
            ``slack`` times the root mean square of all sigma, and becomes lower as they are cut.

    Returns:
        Shape (d,).

    Raises:
        ConfigurationError: a prior of another length than the spectrum, a slack below 1, or another
            side or scale.
    """
    check_choice("`side`", side, SIDES)
    check_choice("`scale`", scale, SCALES)
    check_range("`slack`", slack, at_least=1)
    check_prior(prior, sigma)
    if scale == "free":
        prior = prior * (sigma.norm() / prior.norm())
    return torch.minimum(sigma, slack * prior) if side == "above" else prior


@torch.no_grad()
def counted_moments(
    weight: Tensor, excluded: Optional[Tensor] = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Sum and Gram matrix of the rows that count.

    Args:
        weight: W, shape (n, d).
        excluded: indices of the rows left out (padding and the like), shape (m,).
        dtype: of the arithmetic and the results, unless that of ``weight`` is wider.

    Returns:
        sum_i w_i, shape (d,), and sum_i w_i w_i', shape (d, d).
    """
    dtype = torch.promote_types(weight.dtype, dtype)
    total = weight.new_zeros(weight.size(1), dtype=dtype)
    gram = weight.new_zeros((weight.size(1), weight.size(1)), dtype=dtype)
    for block in weight.split(CONTROL_ROWS):
        exact = block.to(dtype)  # [b, d]
        total += exact.sum(0)
        accumulate_gram(gram, exact)
    mirror_gram(gram)
    if excluded is not None and excluded.numel() > 0:
        rows = weight.index_select(0, excluded).to(dtype)  # [m, d]
        total -= rows.sum(0)
        with full_float32(gram.device):
            gram -= rows.t() @ rows
    return total, gram


@torch.no_grad()
def plan_change(
    weight: Tensor,
    prior: Tensor,
    rate: float,
    *,
    side: str = SIDE,
    slack: float = SLACK,
    scale: str = SCALE,
    centering: float = 0.0,
    excluded: Optional[Tensor] = None,
    summed: Callable[[Tensor], Tensor] = lambda part: part,
) -> TableChange:
    """One step of the decoupled control, not yet applied.

    Args:
        weight: W, shape (n, d); at least d rows count.
        prior: singular values, largest first, shape (d,).
        rate: share of the way to the target, in [0, 1].
        side: as in :func:`spectrum_target`.
        slack: as in :func:`spectrum_target`.
        scale: as in :func:`spectrum_target`.
        centering: share of the mean vector that is taken out first, in [0, 1].
        excluded: rows that are not counted, shape (m,).
        summed: of a table that is split by rows, the sum of a tensor of shape (d + 2, d) over the
            workers; each passes its own rows, and all call this function.

    Returns:
        The change, in float64 for ``both`` and otherwise in float32 or wider; NaN throughout for a
        table with infinity or NaN in it.

    Raises:
        ConfigurationError: a rate, a centering or another option outside its range, a prior of
            another length than the table's width, or fewer rows that count than dimensions.
    """
    check_range("`rate`", rate, at_least=0, at_most=1)
    check_range("`centering`", centering, at_least=0, at_most=1)
    exact = torch.float64 if side == "both" else torch.float32
    total, gram = counted_moments(weight, excluded, exact)
    counted = weight.size(0) - (0 if excluded is None else excluded.numel())
    sums = summed(torch.cat([gram, total[None], torch.full_like(total, counted)[None]]))
    gram, total, count = sums[:-2], sums[-2], round(float(sums[-1, 0]))
    check_rank(count, weight.size(1), "control of the spectrum", "leave the control out")
    # What no eigensolver takes, and entries whose squares the table's own precision does not hold.
    if not torch.isfinite(gram.to(at_least_float32(weight.dtype))).all():
        nan = torch.full_like(gram, float("nan"))
        return TableChange(nan[0], nan[0], nan)
    mean = total / count
    # sum_i (w_i - c m)(w_i - c m)' = G - c (2 - c) N m m'
    gram -= (centering * (2 - centering) * count) * torch.outer(mean, mean)
    sigma, vectors = right_singular_system_of_gram(gram, count)
    # What was subtracted leaves its roundoff: spectra.py, Note [Roundoff of a Gram matrix].
    noise = roundoff(count, weight.size(1), gram.dtype) * count * mean.square().sum()
    noise = torch.maximum(noise, (SMALLEST * sigma[0]).square())
    sigma = torch.where(sigma.square() > noise, sigma, torch.zeros_like(sigma))
    target = spectrum_target(sigma, prior.to(sigma), side=side, slack=slack, scale=scale)
    ratio = 1 + rate * (target - sigma) / sigma
    if (side, scale) == ("both", "free"):
        resolved = sigma > 0
        ratio *= sigma.norm() / (ratio * sigma)[resolved].norm()
    # A direction that no row has, or one lost in roundoff, cannot be stretched.
    ratio = torch.where(sigma > 0, ratio, torch.ones_like(ratio))
    return TableChange(centering * mean, ratio, vectors)


@torch.no_grad()
def apply_change_(weight: Tensor, change: TableChange, excluded: Optional[Tensor] = None) -> None:
    """Carry a change out in place; excluded rows stay as they are, bit for bit.

    The part of W along the directions whose ratio is not 1 is added to it (ratio - 1) times, so
    that the rest is not even rounded, and a one-sided change costs 4 N d products for each
    direction that stands out.

    Args:
        weight: W, shape (n, d).
        change: what to do.
        excluded: rows to leave alone, shape (m,).

    Raises:
        DataError: the change was planned from a table with infinity or NaN in it.
    """
    change.check()
    dtype = at_least_float32(weight.dtype)
    if bool((change.ratio > MOST_IN_FLOAT32).any()):
        dtype = torch.float64
    shift, ratio, vectors = (part.to(dtype) for part in change)
    moved = ratio != 1
    vectors = vectors[:, moved]  # [d, r]
    factors = [vectors, ((ratio[moved] - 1) * vectors).t()]  # [d, r], [r, d]
    centred = bool(shift.any())
    if not (centred or vectors.size(1)):
        return
    kept = None if excluded is None else (excluded, weight[excluded])
    with full_float32(weight.device):
        if 2 * vectors.size(1) > vectors.size(0):
            factors = [factors[0] @ factors[1]]  # then one product with d x d is cheaper
        for block in weight.split(CONTROL_ROWS):
            exact = block.to(dtype)  # [b, d]; the block itself where it has this dtype
            if centred:
                exact = exact.sub_(shift)
            part = exact
            for factor in factors:
                part = part @ factor
            block.copy_(exact.add_(part))
    if kept is not None:
        weight.index_copy_(0, *kept)


def counted_norm(
    weight: Tensor, excluded: Tensor, summed: Callable[[Tensor], Tensor] = lambda part: part
) -> float:
    """Frobenius norm of the rows that count, in float64; NaN if any row has NaN or infinity.

    Args:
        weight: shape (N, d).
        excluded: rows that are not counted, shape (m,).
        summed: the sum of a tensor over the workers, of a table that is split by rows.
    """
    blocks = weight.detach().split(CONTROL_ROWS)
    lengths = torch.cat([row_lengths(widened(block)) for block in blocks])
    lengths[excluded] *= 0  # which leaves NaN, so that it is seen there too
    return math.sqrt(float(summed(lengths.square().sum())))
