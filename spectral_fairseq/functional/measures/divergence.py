"""Expected pairwise Kullback-Leibler divergence of next-word distributions.

Yang, Dai, Salakhutdinov, Cohen: "Breaking the Softmax Bottleneck", ICLR 2018, appendix C.1, table
11: E_{c, c'}[KL(P(. | c) || P(. | c'))], large where a model tells contexts apart. The paper
samples pairs. Over all ordered pairs of T contexts the mean has a closed form that needs one pass:

    1/T^2 sum_{c,c'} KL(p_c || p_c') = mean_c <p_c, log p_c> - <mean_c p_c, mean_c log p_c>

A pair c = c' contributes 0; over the T (T - 1) pairs of different contexts, which is what is
returned, the mean is T / (T - 1) times that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectral_fairseq.errors import DataError


class ExpectedPairwiseKL:
    """Sums over blocks of contexts; three vectors of N numbers whatever their count.

    Args:
        words: N.
    """

    def __init__(self, words: int) -> None:
        self.contexts = 0
        self._negative_entropy = 0.0
        self._probability = torch.zeros(words, dtype=torch.float64)
        self._log_probability = torch.zeros(words, dtype=torch.float64)

    def add(self, log_probabilities: Tensor) -> None:
        """Append contexts.

        Args:
            log_probabilities: log P(. | c), normalised, shape (b, N).
        """
        exact = log_probabilities.double()
        probabilities = exact.exp()
        self.contexts += exact.size(0)
        # torch.xlogy would compute the logarithm again; 0 * -inf is 0 here.
        self._negative_entropy += float((probabilities * exact).nan_to_num_(0.0).sum())
        self._probability += probabilities.sum(0)
        self._log_probability += exact.sum(0)

    def value(self) -> float:
        """The mean over pairs of different contexts, in nats.

        Raises:
            DataError: fewer than two contexts.
        """
        count = self.contexts
        if count < 2:
            raise DataError(
                "at least two contexts for a pairwise divergence", str(count), "Use more data."
            )
        cross = float(self._probability @ self._log_probability) / count**2
        return max((self._negative_entropy / count - cross) * count / (count - 1), 0.0)
