"""Whether a vector lies inside the convex hull of hidden states.

Gao et al., ICLR 2019, https://openreview.net/forum?id=SkEYojRqtm, theorem 2: a direction v with
<h, v> < 0 for every hidden state h exists if and only if the convex hull of the states does not
contain the origin. Along such a direction the vector of a word that never occurs moves to infinity
(theorem 1), so this is the paper's condition for degeneration. The linear program

    maximise t  subject to  <(h_i - x) / ||h_i - x||, v> + t <= 0 for all i,  -1 <= v_j <= 1

has a solution t > 0 exactly if x is outside of the hull. Dividing by the lengths changes nothing in
that, and makes the program well conditioned.

The answer is exact for the states that are passed; more of them can only enlarge the hull. M states
drawn from a distribution that is symmetric about the origin contain it with the probability of
:func:`hull_probability` (Wendel, Math. Scand. 11, 1962, https://doi.org/10.7146/math.scand.a-10655),
which jumps from 0 to 1 around M = 2 d: fewer states than that cannot tell anything.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from spectral_fairseq.errors import UnsupportedError
from spectral_fairseq.functional.linalg.row_norms import SMALLEST_NORM

# Of the solver's own tolerance, 1e-7, for points of unit length.
_SMALLEST_MARGIN = 1e-6


class Separation(NamedTuple):
    """The hyperplane between a vector and a cloud of points.

    Attributes:
        inside: whether the vector is in the convex hull.
        direction: v, shape (d,), with <h_i - x, v> < 0 for all points; zero where inside.
    """

    inside: bool
    direction: Tensor


def separate(points: Tensor, vector: Tensor) -> Separation:
    """Return whether ``vector`` is in the convex hull of ``points``, and else what separates them.

    Args:
        points: h_i, shape (M, d), M >= 1.
        vector: x, shape (d,).

    Raises:
        UnsupportedError: the solver fails.
    """
    from scipy.optimize import linprog  # slow to import, and seldom needed

    away = (points.double() - vector.double()).cpu()  # [M, d]
    lengths = away.norm(dim=1, keepdim=True)
    dim = away.size(1)
    if float(lengths.min()) <= SMALLEST_NORM:
        return Separation(True, torch.zeros(dim, dtype=torch.float64))
    rows = torch.cat([away / lengths, torch.ones(len(away), 1, dtype=torch.float64)], 1)
    found = linprog(
        [0.0] * dim + [-1.0],
        A_ub=rows.numpy(),
        b_ub=[0.0] * len(rows),
        bounds=[(-1, 1)] * dim + [(0, None)],
        method="highs",
    )
    if not found.success:
        raise UnsupportedError(
            "a solution of the linear program of the convex hull",
            found.message,
            "Use fewer states.",
        )
    direction = torch.tensor(found.x[:-1], dtype=torch.float64)
    inside = float(found.x[-1]) <= _SMALLEST_MARGIN
    return Separation(inside, torch.zeros_like(direction) if inside else direction)


def hull_probability(count: int, dim: int) -> float:
    """Return the probability that M symmetric random points contain the origin in their hull.

    Args:
        count: M.
        dim: d.
    """
    if count <= dim:
        return 0.0
    # Terms C(M - 1, k) / 2^(M - 1) from logarithms, which are far apart in size.
    terms = [
        math.lgamma(count) - math.lgamma(k + 1) - math.lgamma(count - k) - (count - 1) * math.log(2)
        for k in range(dim)
    ]
    return max(1 - math.fsum(map(math.exp, terms)), 0.0)
