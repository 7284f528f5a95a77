"""An embedding table stored as its singular value decomposition, W = U diag(sigma) V'.

Wang et al., ICLR 2020, equation 4.1. The penalties of :mod:`functional.penalties.spectrum`
and :mod:`functional.penalties.orthogonality` keep U and V near orthonormal and sigma near
its prior; this module only stores the factors and multiplies by them.
"""

# No "from __future__ import annotations" here: TorchScript reads the annotations of the buffers.
import math
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectral_fairseq.embeddings.factored import FactoredEmbedding, hook
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.linalg.gram import gram
from spectral_fairseq.functional.penalties.spectrum import prior_spectrum

# Note [Scales of the factors]
# ----------------------------
# An optimiser step is taken on what is stored, so the storage decides what a learning rate means.
# With orthonormal U the entries are about 1/sqrt(N): one Adam step of 2.5e-4 would be 13 % of an
# entry at N = 267,735, and an SGD step on U moves W by sigma^2 times as much as on a plain table.
# Stored are therefore
#
#     U' = s U,   sigma' = sigma / s,   V' = v V,   s = RMS(sigma) at the start,
#
# so that W = U' diag(sigma') (V'/v)', U' has the size of a plain table's entries, and sigma' is
# near 1. V is shared by all words: a step on it rotates every vector at once, about as far as a
# plain table's vectors move one by one, and coherently. v slows that down. docs/spectrum.md has
# the training curves from which the default v was chosen.
#
# v is part of the checkpoint format: what is saved is V'.
V_SCALE = 16.0


class SVDEmbedding(FactoredEmbedding):
    """Look-up table and output projection that share W = U diag(sigma) V', never built in training.

    Shapes: U (N, d), sigma (d,), V (d, d), for N words (padding and made-up rows are stored but
    left out of the factorisation) and d dimensions.

    Args:
        num_embeddings: N, all rows of the dictionary.
        embedding_dim: d.
        padding_idx: row that starts at zero and never receives a gradient, neither from the
            look-up nor from the softmax.
        excluded_rows: further rows that no penalty or measure should count (``madeupword0000``).
        prior: ``exponential`` or ``polynomial``.
        c1: scale of the prior; ``None`` keeps the Frobenius norm that the table starts with.
        c2: decay of the exponential prior.
        gamma: decay rate of either prior.
        frobenius_norm: of the initial table; ``None`` is that of fairseq's own initialisation,
            entries from N(0, 1/d).

    Raises:
        ConfigurationError: fewer counted words than dimensions, or an impossible prior.
    """

    scale: Tensor
    initial_norm: Tensor
    prior_shape: Tensor
    excluded_rows: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int,
        excluded_rows: Sequence[int] = (),
        *,
        prior: str = "exponential",
        c1: Optional[float] = None,
        c2: float = 0.0005,
        gamma: float = 1.0,
        frobenius_norm: Optional[float] = None,
    ) -> None:
        super().__init__()
        excluded = sorted({padding_idx, *excluded_rows})
        counted = num_embeddings - len(excluded)
        if counted < embedding_dim:
            raise ConfigurationError(
                "at least as many words as dimensions (N >= d) for an SVD table",
                f"N = {counted} words, padding and made-up rows left out, and d = {embedding_dim}",
                "Use a smaller --encoder-embed-dim/--decoder-embed-dim, a larger dictionary, "
                "or --embedding-type plain.",
            )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.v_scale = V_SCALE
        self.prior_kind, self.c1, self.c2, self.gamma = prior, c1, c2, gamma
        self.U = nn.Parameter(torch.zeros(num_embeddings, embedding_dim))
        self.sigma = nn.Parameter(torch.ones(embedding_dim))
        self.V = nn.Parameter(self.v_scale * torch.eye(embedding_dim))
        # Both are written to checkpoints: s, without which U cannot be read, and the norm an
        # automatic c1 refers to.
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("initial_norm", torch.ones(()))
        self.register_buffer("excluded_rows", torch.tensor(excluded), persistent=False)
        # With an automatic c1 the prior is this shape, of norm 1, times the initial norm.
        shape = prior_spectrum(prior, embedding_dim, c1=c1, c2=c2, gamma=gamma, frobenius_norm=1.0)
        self.register_buffer("prior_shape", shape, persistent=False)
        if frobenius_norm is None:
            frobenius_norm = math.sqrt(counted)
        self.initial_norm.fill_(frobenius_norm)
        self.reset_parameters()
        self._register_hooks()

    def reset_parameters(self) -> None:
        """Draw U uniformly among orthonormal matrices, set sigma to the prior and V to I.

        With V = I and a flat prior W is distributed as a plain table of orthogonal columns, and
        an optimiser that scales coordinates one by one (Adam) sees the same coordinates.
        """
        counted = self._counted_rows()
        q, r = torch.linalg.qr(torch.randn(len(counted), self.embedding_dim))
        q *= r.diagonal().sign()  # without this the distribution is not the uniform one
        u = torch.zeros(self.num_embeddings, self.embedding_dim)
        u[counted] = q
        self._store(u, self.prior(), torch.eye(self.embedding_dim))

    @classmethod
    def from_dense(cls, weight: Tensor, padding_idx: int, **options: Any) -> "SVDEmbedding":
        """The table whose product equals ``weight`` to float precision.

        Args:
            weight: shape (N, d).
            padding_idx: as for the constructor.
            **options: the constructor's others.
        """
        table = cls(weight.size(0), weight.size(1), padding_idx, **options)
        table.load_state_dict(table.factor(weight))
        return table

    @torch.no_grad()
    def factor(self, weight: Tensor) -> Dict[str, Tensor]:
        """The state dict of this table that equals a dense one; deterministic.

        Args:
            weight: shape (N, d).

        Returns:
            The entries of :meth:`state_dict`; an automatic c1 then refers to the norm of
            ``weight``.
        """
        dense = weight.detach().to("cpu", torch.float64)
        counted = self._counted_rows()
        u, sigma, v = _thin_svd(dense[counted])
        full = dense.new_zeros(dense.shape)
        if sigma[-1] > sigma[0] * max(dense.shape) * torch.finfo(torch.float64).eps:
            full[counted] = u
            excluded = self.excluded_rows.cpu()
            full[excluded] = dense[excluded] @ v / sigma
        else:
            # A rank-deficient table: the excluded rows may lie outside the counted rows' span.
            full, sigma, v = _thin_svd(dense)
        scale = sigma.square().mean().sqrt()
        return {
            "U": (full * scale).to(weight.dtype).contiguous(),
            "sigma": (sigma / scale).to(weight.dtype).contiguous(),
            "V": (v * self.v_scale).to(weight.dtype).contiguous(),
            "scale": scale.float(),
            "initial_norm": dense[counted].norm().float(),
        }

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings of ``tokens`` (any shape): shape (*tokens.shape, d)."""
        rows = F.embedding(tokens, self.U, self.padding_idx)  # [*, d]
        return F.linear(rows * self.sigma, self.V / self.v_scale)

    def operands(self, features: Tensor) -> Tuple[Tensor, Tensor]:
        """(x, M) such that x M' are the logits W h of ``features`` h, shape (*, d).

        x = (h V) sigma, shape (*, d), and M = U, shape (N, d): W is never built.
        """
        return torch.matmul(features, self.V / self.v_scale) * self.sigma, self.U

    def project(self, features: Tensor) -> Tensor:
        """Logits W h of ``features`` h, shape (*, d): shape (*, N)."""
        rows, matrix = self.operands(features)
        return F.linear(rows, matrix)

    @property
    def weight(self) -> Tensor:
        """The dense table W, shape (N, d), built anew at each call."""
        return F.linear(self.U * self.sigma, self.V / self.v_scale)

    def prior(self) -> Tensor:
        """The prior's singular values, largest first, float32, shape (d,)."""
        return self.prior_shape * self.initial_norm if self.c1 is None else self.prior_shape

    def singular_values(self) -> Tensor:
        """sigma as learned, float32, shape (d,); those of W while U and V are orthonormal."""
        return self.sigma.float() * self.scale

    def grams(self) -> Tuple[Tensor, Tensor]:
        """U'U over the counted rows and V'V, float32, each of shape (d, d)."""
        u_gram = gram(self.U.float(), self.excluded_rows) / self.scale.square()
        v_gram = gram(self.V.float()) / self.v_scale**2
        return u_gram, v_gram

    def extra_repr(self) -> str:
        """What ``print(model)`` shows in the brackets."""
        c1 = "auto" if self.c1 is None else self.c1
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, prior={self.prior_kind}, c1={c1}, "
            f"c2={self.c2}, gamma={self.gamma}"
        )

    def _register_hooks(self) -> None:
        hook(self.U, self._without_padding)

    def _counted_rows(self) -> Tensor:
        mask = torch.ones(self.num_embeddings, dtype=torch.bool)
        mask[self.excluded_rows.cpu()] = False
        return mask.nonzero().squeeze(1)

    @torch.no_grad()
    def _store(self, u: Tensor, sigma: Tensor, v: Tensor) -> None:
        self.scale.copy_(sigma.square().mean().sqrt())
        self.U.copy_(u * self.scale)
        self.sigma.copy_(sigma / self.scale)
        self.V.copy_(v * self.v_scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> "SVDEmbedding":
        # .half() and .bfloat16() reach every buffer; these must keep their precision.
        exact = {name: getattr(self, name) for name in ("scale", "initial_norm", "prior_shape")}
        super()._apply(fn, *args, **kwargs)
        for name, value in exact.items():
            setattr(self, name, value.to(getattr(self, name).device))
        return self


def _thin_svd(matrix: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """U (n, d), sigma (d,) downwards, V (d, d) of a tall matrix, by way of its QR factor."""
    q, r = torch.linalg.qr(matrix)
    u, sigma, vh = torch.linalg.svd(r)
    return q @ u, sigma, vh.t()
