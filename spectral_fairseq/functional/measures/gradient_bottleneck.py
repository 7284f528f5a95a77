"""The share of the logits' gradient that a linear output layer cannot pass on.

Godey, Artzi: "Lost in Backpropagation: The LM Head is a Gradient Bottleneck", 2026,
https://arxiv.org/abs/2603.10145. The gradient of the cross-entropy by the logits is g = p - e_y, of
N numbers. The hidden state receives W'g, of d numbers: the part of g that is orthogonal to the
columns of W is lost. The measure here is defined as

    lost = 1 - sum_t ||P g_t||^2 / sum_t ||g_t||^2,      P = W (W'W)^+ W'

over the states t of a sample, P being the projector on the column space of W. It is a share of the
squared norm, and the paper's abstract speaks of 95 to 99 % of the norm. A g of random direction
would lose 1 - d / N.

With W'W = V diag(sigma^2) V', ||P g||^2 = sum_k (v_k'W'g)^2 / sigma_k^2, so neither P nor a second
matrix of the size of W is built.
"""

from __future__ import annotations

from torch import Tensor

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.linalg.singular_values import right_singular_system


class GradientBottleneck:
    """Accumulates the lost share over blocks of states.

    Args:
        weight: W, shape (N, d), of one linear output layer with a softmax.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.detach()
        sigma, directions = right_singular_system(self._weight)
        resolved = sigma > 0
        self._whitening = directions[:, resolved] / sigma[resolved]  # [d, rank]
        self._passed = 0.0
        self._total = 0.0

    def add(self, log_probabilities: Tensor, targets: Tensor) -> None:
        """Add states.

        Args:
            log_probabilities: log p, shape (b, N).
            targets: y, shape (b,).
        """
        p = log_probabilities.exp()
        of_target = p.gather(1, targets.unsqueeze(1)).squeeze(1).double()  # [b]
        reached = (p.to(self._weight) @ self._weight - self._weight[targets]).double()  # [b, d]
        self._passed += float((reached @ self._whitening).square().sum())
        # ||p - e_y||^2
        self._total += float((p.double().square().sum(1) - 2 * of_target + 1).sum())

    def lost(self) -> float:
        """Return the lost share, between 0 and 1.

        Raises:
            DataError: no states, or every prediction is certain and right.
        """
        if self._total <= 0:
            raise DataError("a gradient that is not zero", "none", "Use more data.")
        return min(max(1 - self._passed / self._total, 0.0), 1.0)
