"""An embedding table stored as lengths and directions, W_k = g_k v_k / ||v_k||.

Herold, Gao, Ney: "Improving Neural Language Models with Weight Norm Initialization and
Regularization", WMT 2018, https://aclanthology.org/W18-6310. Section 4 has the table (equation
8), its initialisation g_k = sigma log c_k (9), and the schedule that slows the lengths down as
training goes on (10). The schedule is a factor on a gradient. The paper's models were trained by
SGD; Adam divides such a factor out again, so that under Adam only the other two act.

Flags: ``--weight-norm-init-sigma`` 0.5, ``--weight-norm-init-range`` 0.1,
    ``--weight-norm-gradient-scale`` 0.1, ``--weight-norm-gradient-epochs`` 100.
In order: ``WeightNormEmbedding.build``, ``WeightNormEmbedding.operands``, ``tell_epoch``.
"""

# No "from __future__ import annotations" here: TorchScript reads the annotations of the buffers.
import math
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectral_fairseq.embeddings.table import FactoredEmbedding, TableSpec
from spectral_fairseq.errors import check_count, check_range
from spectral_fairseq.functional.products import linear
from spectral_fairseq.functional.row_blocks import check_finite
from spectral_fairseq.functional.word_counts import smoothed_log_counts
from spectral_fairseq.options import Option

# Lower bound on ||v||, to avoid division by zero.
MIN_LENGTH = 1e-12
# The same in float16, where 1e-12 is zero: the smallest number of full precision.
MIN_LENGTH_FLOAT16 = 2.0**-14


def gradient_scale(epoch: int, gamma: float, tau: float) -> float:
    """The factor on the gradient of the lengths in an epoch, equation 10.

    Args:
        epoch: t, counted from 1; 0 stands for training outside epochs and gives 1.
        gamma: the factor after epoch tau, from 0 to 1.
        tau: the epoch up to which the factor falls linearly, above 0.

    Returns:
        1 - (1 - gamma) t / tau up to epoch tau, gamma afterwards.
    """
    return 1 - (1 - gamma) * min(epoch / tau, 1.0)


def tell_epoch(model: nn.Module, epoch: int) -> None:
    """Tell all weight-norm tables of a model that an epoch begins; the first one is 1."""
    for module in model.modules():
        if isinstance(module, WeightNormEmbedding):
            module.set_epoch(epoch)


class WeightNormEmbedding(FactoredEmbedding):
    """Look-up table and output projection that share W_k = g_k v_k / ||v_k||.

    Shapes: g (N,), v (N, d), for N words and d dimensions.

    The first four arguments are those of :class:`FactoredEmbedding`.

    Args:
        counts: c_k, one for each row; ``None`` starts every length at the mean that v gives a
            plain table, which is weight normalisation without the paper's initialisation.
        sigma: length of a vector per log count, above 0.
        init_range: r; v is drawn uniformly from [-r, r].
        gamma: factor on the gradient of g after epoch ``tau``, from 0 to 1.
        tau: epochs over which the factor falls from 1 to gamma, above 0.

    Raises:
        ConfigurationError: an option outside its range, or not one count for each row.
        DataError: no word is counted more than once.
    """

    kind = "weight-norm"
    summary = "lengths and directions"
    entries = ("v", "g")
    starts_from_counts = True
    options = (
        Option(
            "weight_norm_init_sigma",
            0.5,
            "sigma: a weight-norm table's vectors start with length sigma log(count); 0.1 unless "
            "given in a Transformer and a Transformer-XL, and the paper's 0.5 elsewhere",
            argument="sigma",
        ),
        Option(
            "weight_norm_init_range",
            0.1,
            "r: initial directions of a weight-norm table are drawn uniformly from [-r, r]",
            argument="init_range",
        ),
        Option(
            "weight_norm_gradient_scale",
            0.1,
            "gamma: factor that the gradient of a weight-norm table's lengths has fallen to after "
            "tau epochs; Adam divides such a factor out again unless it is 0",
            argument="gamma",
        ),
        Option(
            "weight_norm_gradient_epochs",
            100.0,
            "tau: epochs over which the gradient of a weight-norm table's lengths falls linearly",
            argument="tau",
        ),
    )

    excluded_rows: Tensor
    slowing: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: Optional[int],
        excluded_rows: Sequence[int] = (),
        *,
        counts: Optional[Sequence[float]] = None,
        sigma: float = 0.5,
        init_range: float = 0.1,
        gamma: float = 0.1,
        tau: float = 100.0,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, excluded_rows)
        for name, value in (("sigma", sigma), ("init_range", init_range), ("tau", tau)):
            check_range(f"`{name}`", value, above=0)
        check_range("`gamma`", gamma, at_least=0, at_most=1)
        if counts is not None:
            remedy = "Pass those of the dictionary that the table is for."
            check_count(len(counts), num_embeddings, "counts, one for each row", remedy)
        self.sigma, self.init_range, self.gamma, self.tau = sigma, init_range, gamma, tau
        self.epoch = 0
        # A tensor, so that a compiled model stays as it is from one epoch to the next.
        self.register_buffer("slowing", torch.ones(()), persistent=False)
        self.g = nn.Parameter(torch.zeros(num_embeddings))
        self.v = nn.Parameter(torch.zeros(num_embeddings, embedding_dim))
        self.reset_parameters(counts)

    @torch.no_grad()
    def reset_parameters(self, counts: Optional[Sequence[float]] = None) -> None:
        """Draw v uniformly from [-r, r] and set g to sigma log c, smoothed (equation 9).

        Args:
            counts: as for the constructor, which does not keep them.
        """
        self.v.uniform_(-self.init_range, self.init_range)
        if counts is None:
            self.g.fill_(self.init_range * math.sqrt(self.embedding_dim / 3))
        else:
            self.g.copy_(self.sigma * smoothed_log_counts(counts).to(self.g.device))
        if self.padding_idx is not None:
            self.g[self.padding_idx] = 0
            self.v[self.padding_idx] = 0

    @classmethod
    def build(cls, spec: TableSpec, **options: Any) -> "WeightNormEmbedding":
        """A new table whose lengths start from the counts, whatever the architecture's range."""
        return cls(*spec[:4], counts=spec.counts, **options)

    @torch.no_grad()
    def factor(self, weight: Tensor) -> Dict[str, Tensor]:
        """The state dict with which this table equals a dense one; deterministic.

        v is the dense table itself, so that an optimiser step on v turns a vector as far as the
        same step on the plain table.

        Returns:
            The two entries.
        """
        check_finite(weight, "the table")
        v = weight.detach().clone().contiguous()
        g = torch.linalg.vector_norm(v.double(), dim=1)
        # A zero vector has no direction and could never move again. The padding row must not move.
        unmoved = g == 0
        if self.padding_idx is not None:
            unmoved[self.padding_idx] = False
        v[unmoved] = self.init_range
        # What is shorter than `_lengths` divides by keeps its direction, at the length of these.
        half = v.dtype == torch.float16
        short = (g > 0) & (g < (MIN_LENGTH_FLOAT16 if half else MIN_LENGTH))
        if bool(short.any()):
            units = v[short].double() / g[short].unsqueeze(1)
            v[short] = (units * self.init_range * math.sqrt(v.size(1))).to(v.dtype)
        return {"g": g.to(weight.dtype), "v": v}

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings of ``tokens`` (any shape): shape (*tokens.shape, d)."""
        v = F.embedding(tokens, self.v, self.padding_idx)  # [*, d]
        g = F.embedding(tokens, self._slowed().unsqueeze(1), self.padding_idx)  # [*, 1]
        return v * (g / _lengths(v))

    def operands(self, features: Tensor) -> Tuple[Tensor, Tensor]:
        """(h, W) of ``features`` h, shape (*, d)."""
        return features, self.dense()

    def project(self, features: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        """Logits W h + b of ``features`` h, shape (*, d), and ``bias`` b, shape (N,).

        g_k / ||v_k|| multiplies whichever is smaller: the logits h'v_k of a few tokens, as in
        decoding, or the N x d table, which saves a copy of the logits in training.

        Returns:
            Shape (*, N).
        """
        if features.numel() >= self.embedding_dim * self.embedding_dim:
            return linear(features, self.dense(), bias)
        scale = self._without_padding(self._slowed() / _lengths(self.v).squeeze(1))  # [N]
        products = linear(features, self._without_padding(self.v))  # [*, N]
        logits = products * scale
        if bias is not None:
            logits = logits + bias
        return logits.to(products.dtype)  # autocast's, as the other product gives them

    def dense(self) -> Tensor:
        """The matrix W, shape (N, d), differentiable, computed anew at each call."""
        return self._without_padding(self.v * (self._slowed().unsqueeze(1) / _lengths(self.v)))

    @classmethod
    def dense_rows(cls, entries: Mapping[str, Tensor], rows: Tensor, dtype: torch.dtype) -> Tensor:
        """``rows`` of W_k = g_k v_k / ||v_k||, shape (n, d); a zero v_k gives a zero row."""
        v, g = entries["v"][rows].to(dtype), entries["g"][rows].to(dtype)
        # As the table divides that stores them, whatever the type of this arithmetic.
        half = entries["v"].dtype == torch.float16
        shortest = MIN_LENGTH_FLOAT16 if half else MIN_LENGTH
        return v * (g.unsqueeze(1) / _lengths(v, shortest, shortest))

    def norms(self) -> Tensor:
        """||W_k|| = |g_k|, float32, shape (N,)."""
        return self._without_padding(self._slowed()).float().abs()

    def set_epoch(self, epoch: int) -> None:
        """Take note of the epoch that begins, counted from 1; whoever trains the table calls this.

        The schedule has no other state, so a resumed run continues where it stopped.
        """
        self.epoch = epoch
        self.slowing.fill_(gradient_scale(epoch, self.gamma, self.tau))

    def extra_repr(self) -> str:
        """What ``print(model)`` shows in the brackets."""
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, sigma={self.sigma}, "
            f"r={self.init_range}, gamma={self.gamma}, tau={self.tau}"
        )

    def _slowed(self) -> Tensor:
        """g, shape (N,), whose gradient is multiplied by the factor of equation 10.

        As in ``FactoredEmbedding._without_padding``, no hook of the parameter changes it.
        """
        g = self.g.detach()
        # A copy, since DistributedDataParallel writes to the buffer that autograd has saved.
        return g + self.slowing.clone() * (self.g - g)

    def _fill_constants(self) -> None:
        super()._fill_constants()
        factor = gradient_scale(self.epoch, self.gamma, self.tau)
        self.slowing = torch.tensor(factor, dtype=torch.float32, device=self._device())


def _lengths(
    v: Tensor, shortest: float = MIN_LENGTH, shortest_float16: float = MIN_LENGTH_FLOAT16
) -> Tensor:
    """||v_k|| along the last dimension, which is kept, bounded from below."""
    # The bounds are defaults because TorchScript does not see the module's constants.
    if v.dtype == torch.float16:
        shortest = shortest_float16
    return torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp(min=shortest)
