"""An embedding table divided by its largest singular value, W = c S / sigma_max(S).

Jiang, Chen, Chen, Liu, Wang, Zhao: "On Computation and Generalization of Generative Adversarial
Networks under Spectrum Control", ICLR 2019, https://openreview.net/forum?id=rJNH6sAqY7, divide a
weight by its largest singular value. One step of the power iteration an update follows that value
(Miyato et al., ICLR 2018, https://openreview.net/forum?id=B1QRgziT-). Appendix B of Wang et al.,
ICLR 2020, https://openreview.net/forum?id=ByxY8CNtvr, compares with it on language models.

Flags: ``--spectral-norm-scale`` 1.
In order: ``SpectralNormEmbedding.build``, ``SpectralNormEmbedding.factor_of_stored``,
    ``SpectralNormEmbedding.operands``.
"""

# No "from __future__ import annotations" here: TorchScript reads the annotations of the buffers.
import math
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectral_fairseq.embeddings.table import FactoredEmbedding, TableSpec
from spectral_fairseq.errors import check_range
from spectral_fairseq.functional.precision import widened
from spectral_fairseq.functional.row_blocks import check_finite
from spectral_fairseq.options import Option

# Lower bound on sigma_max, to avoid division by zero.
TINY = 1e-20


class SpectralNormEmbedding(FactoredEmbedding):
    """Look-up table and output projection that share W = c S / sigma_max(S).

    Shapes: S (N, d), its first right singular vector (d,), for N words and d dimensions. Each use
    in training takes one step of the power iteration v <- S'S v / ||S'S v||, and sigma_max is
    ||S v|| / ||v||, whose gradient is that of the exact value once v has converged; it lags behind
    while S changes fast. An average of checkpoints has a v whose length is not 1. Weight decay of
    S changes the length of optimiser steps, not W.

    The first four arguments are those of :class:`FactoredEmbedding`.

    Args:
        scale: c, the largest singular value of W, above 0. Neither paper has one, so it is 1. A
            table that is made from a dense one has that one's largest singular value.
        init_range: r; S is drawn uniformly from [-r, r], or else from N(0, 1/d).

    Raises:
        ConfigurationError: a scale that is not a finite number above 0.
    """

    kind = "spectral-norm"
    summary = "a matrix that is divided by its largest singular value"
    entries = ("stored", "direction", "largest")
    numbers = ("largest",)
    options = (
        Option(
            "spectral_norm_scale",
            1.0,
            "c: the largest singular value of a spectral-norm table; 1 in the paper",
            argument="scale",
        ),
    )

    direction: Tensor
    largest: Tensor
    excluded_rows: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: Optional[int],
        excluded_rows: Sequence[int] = (),
        *,
        scale: float = 1.0,
        init_range: Optional[float] = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, excluded_rows)
        check_range("`scale`", scale, above=0)
        self.init_range, self.scale = init_range, float(scale)
        self.stored = nn.Parameter(torch.zeros(num_embeddings, embedding_dim))
        self.register_buffer("direction", torch.zeros(embedding_dim))
        self.register_buffer("largest", torch.zeros(()))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw S anew and set c to the constructor's scale."""
        if self.stored.is_meta:
            return
        # It is drawn on the CPU, so that a seed gives one table whatever the device.
        shape = (self.num_embeddings, self.embedding_dim)
        stored = torch.randn(shape, device="cpu") / math.sqrt(self.embedding_dim)
        if self.init_range is not None:
            stored.uniform_(-self.init_range, self.init_range)
        if self.padding_idx is not None:
            stored[self.padding_idx] = 0
        self.stored.copy_(stored)
        self.direction.copy_(_first_direction(stored))
        self.largest.fill_(self.scale)

    @classmethod
    def build(cls, spec: TableSpec, **options: Any) -> "SpectralNormEmbedding":
        """A new table whose directions start as the architecture's."""
        return cls(*spec[:4], init_range=spec.init_range, **options)

    @torch.no_grad()
    def factor(self, weight: Tensor) -> Dict[str, Tensor]:
        """The state dict with which this table equals a dense one; deterministic.

        Returns:
            The three entries, with c = sigma_max(W).
        """
        check_finite(weight, "the table")
        stored = weight.detach().clone().contiguous()
        direction = _first_direction(stored)
        largest = torch.linalg.vector_norm(stored.double() @ direction.double())
        return {"stored": stored, "direction": direction, "largest": largest.to(weight.dtype)}

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings of ``tokens`` (any shape): shape (*tokens.shape, d)."""
        return F.embedding(tokens, self.stored, self.padding_idx) * self.factor_of_stored()

    def operands(self, features: Tensor) -> Tuple[Tensor, Tensor]:
        """(c h / sigma_max, S) of ``features`` h, shape (*, d): W is never built."""
        return features * self.factor_of_stored(), self._without_padding(self.stored)

    def dense(self) -> Tensor:
        """The matrix W, shape (N, d), differentiable, computed anew at each call."""
        factor = self.factor_of_stored()
        return self._without_padding(self.stored) * factor

    @classmethod
    def resolved(cls, entries: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """S and the factor of all its rows, c ||v|| / ||S v||, float64."""
        # In float32 at least: torch 1.12 does not multiply halves on a CPU.
        stored = widened(entries["stored"])
        direction = entries["direction"].to(stored.dtype)
        length = torch.linalg.vector_norm(direction.double()).clamp(min=TINY)
        sigma_max = torch.linalg.vector_norm((stored @ direction).double()) / length
        factor = entries["largest"].double() / sigma_max.clamp(min=TINY)
        return {"stored": entries["stored"], "factor": factor}

    @classmethod
    def dense_rows(cls, entries: Mapping[str, Tensor], rows: Tensor, dtype: torch.dtype) -> Tensor:
        """``rows`` of W = c S ||v|| / ||S v||, shape (n, d)."""
        resolved = entries if "factor" in entries else cls.resolved(entries)
        return resolved["stored"][rows].to(dtype) * resolved["factor"].to(dtype)

    def factor_of_stored(self, tiny: float = TINY) -> Tensor:
        """c / sigma_max(S), a differentiable scalar; in training after a step of the iteration."""
        # The bound is a default because TorchScript does not see the module's constants.
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                along = torch.matmul(self.stored, self.direction)
                # S'S v need not fit into half precision where S v does.
                ahead = torch.matmul(self.stored.t(), _unit(along, along))
                self.direction.copy_(_unit(ahead, self.direction))
        # A copy, since the next step changes the buffer that autograd has saved.
        direction = self.direction.clone()
        along = self._without_padding(torch.matmul(self.stored, direction))  # [N]
        sigma_max = _length(along) / _length(direction).clamp(min=tiny)
        return (self.largest / sigma_max.clamp(min=tiny)).to(self.stored.dtype)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows in the brackets."""
        return f"{self.num_embeddings}, {self.embedding_dim}, largest={float(self.largest)}"


def _length(vector: Tensor) -> Tensor:
    """Euclidean norm of a vector, in float32 at least."""
    if vector.dtype == torch.float64:
        return torch.linalg.vector_norm(vector)
    return torch.linalg.vector_norm(vector.float())


def _unit(vector: Tensor, otherwise: Tensor) -> Tensor:
    """A vector of length one, or ``otherwise`` in place of zeros."""
    length = _length(vector)
    return torch.where(length > 0, vector / length, otherwise)


def _first_direction(matrix: Tensor) -> Tensor:
    """The first right singular vector, shape (d,), with a positive largest entry."""
    dense = matrix.detach().double()
    vector = torch.linalg.eigh(dense.t() @ dense).eigenvectors[:, -1]
    vector = vector * torch.sign(vector[vector.abs().argmax()])
    return vector.to(matrix.dtype).contiguous()
