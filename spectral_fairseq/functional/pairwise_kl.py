"""Expected pairwise Kullback-Leibler divergence of next-word distributions.

Yang, Dai, Salakhutdinov, Cohen: "Breaking the Softmax Bottleneck", ICLR 2018,
https://openreview.net/forum?id=HkwZSG-CZ, appendix C.1, table 11: E_{c, c'}[KL(P(. | c) || P(. |
c'))], which is large where a model distinguishes contexts. The paper samples pairs. Over all
ordered pairs of T contexts the mean has a closed form that needs one pass:

    1/T^2 sum_{c,c'} KL(p_c || p_c') = mean_c <p_c, log p_c> - <mean_c p_c, mean_c log p_c>

A pair c = c' contributes 0. The mean over the T (T - 1) pairs of different contexts, which this
module returns, is T / (T - 1) times that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectral_fairseq.errors import check_enough


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
