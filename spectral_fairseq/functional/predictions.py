"""How a model predicts and what its hidden states are like: divergence, cosines, IsoScore, hull."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spectral_fairseq.errors import UnsupportedError, check_enough, needs_extra
from spectral_fairseq.functional.cosines import covariance_from_gram, isoscore
from spectral_fairseq.functional.row_norms import SMALLEST_SHARE, unit_rows

# Expected pairwise Kullback-Leibler divergence of next-word distributions.
#
# Yang, Dai, Salakhutdinov, Cohen: "Breaking the Softmax Bottleneck", ICLR 2018,
# https://openreview.net/forum?id=HkwZSG-CZ, appendix C.1, table 11: E_{c, c'}[KL(P(. | c) || P(. |
# c'))], which is large where a model distinguishes contexts. The paper samples pairs. Over all
# ordered pairs of T contexts the mean has a closed form that needs one pass:
#
#     1/T^2 sum_{c,c'} KL(p_c || p_c') = mean_c <p_c, log p_c> - <mean_c p_c, mean_c log p_c>
#
# A pair c = c' contributes 0. The mean over the T (T - 1) pairs of different contexts, which this
# module returns, is T / (T - 1) times that.


class ExpectedPairwiseKL:
    """Accumulates the mean over blocks of contexts, in memory that does not grow with them.

    Args:
        vocabulary: N.
    """

    def __init__(self, vocabulary: int) -> None:
        self.contexts = 0
        self._negative_entropy = 0.0
        self._probability = torch.zeros(vocabulary, dtype=torch.float64)
        self._log_probability = torch.zeros(vocabulary, dtype=torch.float64)

    def add(self, log_probabilities: Tensor) -> None:
        """Add contexts.

        Args:
            log_probabilities: log P(. | c), normalised, shape (b, N).
        """
        log_p = log_probabilities.double()
        p = log_p.exp()
        # They are on the device of the contexts from the first block on.
        self._probability = self._probability.to(p.device)
        self._log_probability = self._log_probability.to(p.device)
        self.contexts += log_p.size(0)
        # 0 * -inf counts as 0; torch.xlogy would compute the logarithm again.
        self._negative_entropy += float((p * log_p).masked_fill_(p == 0, 0.0).sum())
        self._probability += p.sum(0)
        self._log_probability += log_p.sum(0)

    def value(self) -> float:
        """Return the mean over pairs of different contexts, in nats; NaN if a probability was NaN.

        Raises:
            DataError: fewer than two contexts.
        """
        count = self.contexts
        check_enough(count, 2, "contexts for a pairwise divergence", "Use more data.")
        products = self._probability * self._log_probability
        # 0 * -inf counts as 0 here, too: a word that no context allows.
        cross = float(products.masked_fill_(self._probability == 0, 0.0).sum()) / count**2
        return max((self._negative_entropy / count - cross) * count / (count - 1), 0.0)


# Measures of the hidden states of one layer, from one pass over blocks of states.
#
# Ethayarajh: "How Contextual are Contextualized Word Representations?", EMNLP 2019,
# https://aclanthology.org/D19-1006/, measures their mean cosine; IsoScore is that of
# ``cosines.py``.


class StateStatistics:
    """Accumulates what the measures of a layer need, d x d numbers however many states come.

    Args:
        dim: d.
    """

    def __init__(self, dim: int) -> None:
        self.count = 0
        self._gram = torch.zeros(dim, dim, dtype=torch.float64)
        self._sum = torch.zeros(dim, dtype=torch.float64)
        self._unit_sum = torch.zeros(dim, dtype=torch.float64)
        self._with_direction = 0

    def add(self, states: Tensor) -> None:
        """Add states, shape (b, d)."""
        wide = states.detach().double()
        units = unit_rows(wide)
        self.count += wide.size(0)
        self._gram += (wide.t() @ wide).cpu()
        self._sum += wide.sum(0).cpu()
        self._unit_sum += units.sum(0).cpu()
        self._with_direction += int(units.any(1).sum())

    def mean_cosine(self) -> float:
        """Return the mean cosine over all pairs of different states.

        Raises:
            DataError: fewer than two states.
        """
        check_enough(self.count, 2, "states for a mean cosine", "Use more data.")
        pairs = self.count * (self.count - 1)
        return (float(self._unit_sum.square().sum()) - self._with_direction) / pairs

    def isoscore(self) -> float:
        """Return the IsoScore of the states.

        Raises:
            DataError: fewer than two states or dimensions.
        """
        return isoscore(covariance_from_gram(self._gram, self._sum, self.count))


# Whether the origin lies inside the convex hull of hidden states.
#
# Gao et al., ICLR 2019, https://openreview.net/forum?id=SkEYojRqtm, theorem 2: a direction v with
# <h, v> < 0 for every hidden state h exists if and only if the convex hull of the states does not
# contain the origin. Along such a direction the vector of a word that never occurs moves to
# infinity (theorem 1), so this is the paper's condition for degeneration. The linear program
#
#     maximise t  subject to  <h_i / ||h_i||, v> + t <= 0 for all i,  -1 <= v_j <= 1
#
# has a solution t > 0 exactly if the origin is outside of the hull. Dividing by the lengths changes
# nothing in that, and makes the program well conditioned.
#
# The answer is exact for the states that are passed; more of them can only enlarge the hull. M
# states drawn from a distribution that is symmetric about the origin contain it with the
# probability of :func:`hull_probability` (Wendel, Math. Scand. 11, 1962,
# https://doi.org/10.7146/math.scand.a-10655), which jumps from 0 to 1 around M = 2 d: fewer states
# than that cannot tell anything.


# Of the solver's own tolerance, 1e-7, for points of unit length.
_SMALLEST_MARGIN = 1e-6


def origin_in_hull(points: Tensor) -> bool:
    """Return whether the convex hull of ``points``, h_i of shape (M, d), M >= 1, has the origin.

    Raises:
        UnsupportedError: the solver fails.
    """
    with needs_extra("predictions", "for the convex hull of hidden states"):
        from scipy.optimize import linprog  # slow to import, and seldom needed
    points = points.double().cpu()
    lengths = points.norm(dim=1, keepdim=True)
    dim = points.size(1)
    if float(lengths.min()) <= SMALLEST_SHARE * float(points.abs().max()):
        return True
    rows = torch.cat([points / lengths, torch.ones(len(points), 1, dtype=torch.float64)], 1)
    solution = linprog(
        [0.0] * dim + [-1.0],
        A_ub=rows.numpy(),
        b_ub=[0.0] * len(rows),
        bounds=[(-1, 1)] * dim + [(0, None)],
        method="highs",
    )
    if not solution.success:
        raise UnsupportedError(
            "a solution of the linear program of the convex hull",
            solution.message,
            "Use fewer states.",
        )
    return float(solution.x[-1]) <= _SMALLEST_MARGIN


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
