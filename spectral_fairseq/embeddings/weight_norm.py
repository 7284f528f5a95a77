"""An embedding table stored as lengths and directions, W_k = g_k v_k / ||v_k||.

Herold, Gao, Ney: "Improving Neural Language Models with Weight Norm Initialization and
Regularization", WMT 2018, section 4: equation 8 is the table, 9 its start, g_k = sigma log c_k,
and 10 the schedule that slows the lengths down as training goes on.
"""

# No "from __future__ import annotations" here: TorchScript reads the annotations of the buffers.
import math
from typing import Dict, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectral_fairseq.embeddings.factored import FactoredEmbedding, hook
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.counts import smoothed_log_counts

# A shorter direction is no direction; it also must divide.
SHORTEST = 1e-12
# In float16 that would be zero: there, the smallest number of full precision.
SHORTEST_HALF = 2.0**-14


def gradient_scale(epoch: int, gamma: float, tau: float) -> float:
    """Equation 10: what the gradient of the lengths is multiplied by in an epoch.

    Args:
        epoch: t, counted from 1; 0 stands for training outside epochs and gives 1.
        gamma: the factor after epoch tau, from 0 to 1.
        tau: the epoch up to which the factor falls linearly, above 0.

    Returns:
        1 - (1 - gamma) t / tau up to epoch tau, gamma afterwards.
    """
    return 1 - (1 - gamma) * min(epoch / tau, 1.0)


class WeightNormEmbedding(FactoredEmbedding):
    """Look-up table and output projection that share W_k = g_k v_k / ||v_k||.

    Shapes: g (N,), v (N, d), for N words and d dimensions.

    Args:
        num_embeddings: N, all rows of the dictionary.
        embedding_dim: d.
        padding_idx: row that starts at zero and never receives a gradient, neither from the
            look-up nor from the softmax.
        excluded_rows: further rows that no penalty or measure should count (``madeupword0000``).
        counts: c_k, one for each row; ``None`` starts every length at the mean that v gives a
            plain table, which is weight normalisation without the paper's initialisation.
        sigma: length of a vector per log count, above 0.
        init_range: r; v is drawn uniformly from [-r, r].
        gamma: factor on the gradient of g after epoch ``tau``, from 0 to 1.
        tau: epochs over which the factor falls from 1 to gamma, above 0.

    Raises:
        ConfigurationError: an option outside its range, or not one count for each row.
        DataError: counts that say nothing.
    """

    excluded_rows: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int,
        excluded_rows: Sequence[int] = (),
        *,
        counts: Optional[Sequence[float]] = None,
        sigma: float = 0.5,
        init_range: float = 0.1,
        gamma: float = 0.1,
        tau: float = 100.0,
    ) -> None:
        super().__init__()
        for name, value, low in (("sigma", sigma, 0.0), ("r", init_range, 0.0), ("tau", tau, 0.0)):
            if not (math.isfinite(value) and value > low):
                raise ConfigurationError(
                    f"{name} of the weight-norm initialisation to be a finite number above 0",
                    repr(value),
                    "Correct it.",
                )
        if not 0 <= gamma <= 1:
            raise ConfigurationError(
                "gamma of the weight-norm schedule to lie between 0 and 1",
                repr(gamma),
                "Correct it: 1 keeps the gradient as it is, 0 stops it after tau epochs.",
            )
        if counts is not None and len(counts) != num_embeddings:
            raise ConfigurationError(
                f"one count for each of the {num_embeddings} rows",
                f"{len(counts)} counts",
                "Pass the counts of the dictionary that the table is for.",
            )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.sigma, self.init_range, self.gamma, self.tau = sigma, init_range, gamma, tau
        self.epoch = 0
        self.g = nn.Parameter(torch.zeros(num_embeddings))
        self.v = nn.Parameter(torch.zeros(num_embeddings, embedding_dim))
        excluded = sorted({padding_idx, *excluded_rows})
        self.register_buffer("excluded_rows", torch.tensor(excluded), persistent=False)
        self.reset_parameters(counts)
        self._register_hooks()

    @torch.no_grad()
    def reset_parameters(self, counts: Optional[Sequence[float]] = None) -> None:
        """Draw v uniformly from [-r, r] and set g to sigma log c, smoothed (equation 9)."""
        self.v.uniform_(-self.init_range, self.init_range)
        if counts is None:
            self.g.fill_(self.init_range * math.sqrt(self.embedding_dim / 3))
        else:
            self.g.copy_(self.sigma * smoothed_log_counts(counts))
        self.g[self.padding_idx] = 0
        self.v[self.padding_idx] = 0

    @classmethod
    def from_dense(
        cls, weight: Tensor, padding_idx: int, excluded_rows: Sequence[int] = ()
    ) -> "WeightNormEmbedding":
        """The table whose product equals ``weight``, shape (N, d), to float precision."""
        table = cls(weight.size(0), weight.size(1), padding_idx, excluded_rows)
        table.load_state_dict(table.factor(weight))
        return table

    @torch.no_grad()
    def factor(self, weight: Tensor) -> Dict[str, Tensor]:
        """The state dict of this table that equals a dense one; deterministic.

        v is the dense table itself, so that a step on it turns a vector as far as it would turn
        the plain one.

        Args:
            weight: shape (N, d).

        Returns:
            The entries of :meth:`state_dict`.
        """
        v = weight.detach().clone().contiguous()
        g = torch.linalg.vector_norm(v.double(), dim=1)
        # Without a direction a zero vector could never move again; padding must not.
        unmoved = g == 0
        unmoved[self.padding_idx] = False
        v[unmoved] = self.init_range
        return {"g": g.to(weight.dtype).masked_fill_(unmoved, 0.0), "v": v}

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings of ``tokens`` (any shape): shape (*tokens.shape, d)."""
        v = F.embedding(tokens, self.v, self.padding_idx)  # [*, d]
        g = F.embedding(tokens, self.g.unsqueeze(1), self.padding_idx)  # [*, 1]
        return v * (g / _lengths(v))

    def project(self, features: Tensor) -> Tensor:
        """Logits W h of ``features`` h, shape (*, d): shape (*, N).

        The lengths multiply whichever is smaller: the logits of a few tokens, h'v_k g_k/||v_k||,
        as in decoding, or the table, which saves a copy of the logits in training.
        """
        scale = self.g.unsqueeze(1) / _lengths(self.v)  # [N, 1]
        if features.numel() < self.embedding_dim * self.embedding_dim:
            return F.linear(features, self.v) * scale.squeeze(1)
        return F.linear(features, self.v * scale)

    def operands(self, features: Tensor) -> Tuple[Tensor, Tensor]:
        """(h, W) of ``features`` h: what a loss multiplies, block by block."""
        return features, self.weight

    @property
    def weight(self) -> Tensor:
        """The dense table W, shape (N, d), built anew at each call."""
        return self.v * (self.g.unsqueeze(1) / _lengths(self.v))

    def norms(self) -> Tensor:
        """||W_k|| = |g_k|, float32, shape (N,)."""
        return self.g.float().abs()

    def set_epoch(self, epoch: int) -> None:
        """fairseq's hook: the epoch that begins, counted from 1.

        The schedule has no other state, so a run resumed in its middle goes on where it was.
        """
        self.epoch = epoch

    def extra_repr(self) -> str:
        """What ``print(model)`` shows in the brackets."""
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, sigma={self.sigma}, "
            f"r={self.init_range}, gamma={self.gamma}, tau={self.tau}"
        )

    def _register_hooks(self) -> None:
        hook(self.g, self._scheduled)
        hook(self.v, self._without_padding)

    def _scheduled(self, grad: Tensor) -> Tensor:
        grad = grad * gradient_scale(self.epoch, self.gamma, self.tau)
        grad[self.padding_idx] = 0
        return grad


def _lengths(v: Tensor, shortest: float = SHORTEST, shortest_half: float = SHORTEST_HALF) -> Tensor:
    """||v_k|| over the last dimension, kept, and never so short that it cannot divide."""
    if v.dtype == torch.float16:
        shortest = shortest_half
    return torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp(min=shortest)
