"""An embedding table stored as its singular value decomposition, W = U diag(sigma) V'.

Wang, Huang, Huang, Hu, Wang, Gu: "Improving Neural Language Generation with Spectrum Control",
ICLR 2020, equation 4.1, https://openreview.net/forum?id=ByxY8CNtvr. The penalty of
:mod:`~spectral_fairseq.functional.orthogonality_penalty` keeps U and V near orthonormal, and that
of :mod:`~spectral_fairseq.functional.spectrum_penalty` sigma near its prior. This module stores the
factors and multiplies by them.

Flags: ``--spectrum-prior`` exponential, ``--spectrum-c1`` auto, ``--spectrum-c2`` 0.0005,
    ``--spectrum-gamma``.
In order: ``SVDEmbedding.build``, ``SVDEmbedding.reset_parameters``, ``SVDEmbedding.operands``.
"""

# No "from __future__ import annotations" here: TorchScript reads the annotations of the buffers.
import math
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectral_fairseq.embeddings.table import FactoredEmbedding, FactorMeasures, TableSpec
from spectral_fairseq.errors import CheckpointError, arguments_as_flags, misspelt
from spectral_fairseq.functional.gram import gram, table_gram
from spectral_fairseq.functional.orthogonality_penalty import (
    frobenius_defect,
    identity_residual,
    spectral_defect,
)
from spectral_fairseq.functional.precision import widened
from spectral_fairseq.functional.products import linear
from spectral_fairseq.functional.row_blocks import check_finite, rows_outside
from spectral_fairseq.functional.spectrum_penalty import PRIORS, Prior, check_rank
from spectral_fairseq.options import Option

# Note [Scales of the factors]
# ----------------------------
# An optimiser takes its steps on the stored numbers, so their scale decides what a learning rate
# means. The entries of an orthonormal U are about 1/sqrt(N): one Adam step of 2.5e-4 would change
# them by 13 % at N = 267,735, and an SGD step on U would move W by sigma^2 times as much as a step
# on a plain table. The table therefore stores
#
#     U' = s U,   sigma' = sigma / s,   V' = v V,   s = RMS(sigma) at the start,
#
# so that W = U' diag(sigma') (V'/v)', the entries of U' are as large as those of a plain table, and
# sigma' is near 1. All words share V: a step on V rotates every vector at once, about as far as a
# step on a plain table moves the vectors one by one, but coherently. Dividing by v slows that down.
# studies/spectrum has the training curves from which the default v was chosen.
#
# v is part of the checkpoint format, since V' is what is saved.
V_SCALE = 16.0
_SMALLEST = torch.finfo(torch.float32).tiny


def parse_c1(text: Union[None, str, float]) -> Optional[float]:
    """The scale of a prior as a number; ``None``, or ``auto``, keeps the norm of the table.

    Raises:
        ConfigurationError: ``text`` is neither ``auto`` nor a number.
    """
    if text is None or text == "auto":
        return None
    try:
        return float(text)
    except (TypeError, ValueError):
        raise misspelt("`value` to be 'auto' or a positive number", text) from None


class SVDEmbedding(FactoredEmbedding):
    """Look-up table and output projection that share W = U diag(sigma) V', never built in training.

    Shapes: U (N, d), sigma (d,), V (d, d), for N words and d dimensions. The rows of padding and
    of made-up words are stored too, but U is orthonormal over the others.

    The first four arguments are those of :class:`FactoredEmbedding`.

    Args:
        prior: ``exponential`` or ``polynomial``.
        c1: scale of the prior; ``None`` keeps the Frobenius norm that the table starts with.
        c2: decay of the exponential prior.
        gamma: decay rate of either prior; ``None`` is 1 for the exponential and 0.5 for the
            polynomial one.
        frobenius_norm: of the initial table; ``None`` is that of fairseq's own initialisation,
            entries from N(0, 1/d).

    Raises:
        ConfigurationError: fewer counted words than dimensions, or an impossible prior.
    """

    kind = "svd"
    summary = "its singular value decomposition"
    entries = ("U", "sigma", "V", "scale", "initial_norm")
    numbers = ("scale", "initial_norm")
    settings = frozenset({"initial_norm"})
    undecayed = ("U", "V")
    options = (
        Option(
            "spectrum_prior",
            Prior.kind,
            "decay of the prior of the singular values",
            choices=PRIORS,
            argument="prior",
        ),
        Option(
            "spectrum_c1",
            "auto",
            "c1: scale of the prior, a positive number, or 'auto' to keep the Frobenius norm that "
            "the table starts with",
            parse=parse_c1,
            argument="c1",
        ),
        Option(
            "spectrum_c2",
            Prior.c2,
            "c2 of the exponential prior c1 exp(-c2 k^gamma)",
            argument="c2",
        ),
        Option(
            "spectrum_gamma",
            Prior.gamma,
            "gamma of the prior; 1 for exponential and 0.5 for polynomial if unset",
            type=Optional[float],
            argument="gamma",
        ),
    )

    scale: Tensor
    initial_norm: Tensor
    prior_shape: Tensor
    excluded_rows: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: Optional[int],
        excluded_rows: Sequence[int] = (),
        *,
        prior: str = Prior.kind,
        c1: Optional[float] = Prior.c1,
        c2: float = Prior.c2,
        gamma: Optional[float] = Prior.gamma,
        frobenius_norm: Optional[float] = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, excluded_rows)
        counted = num_embeddings - len(self.excluded_rows)
        check_rank(counted, embedding_dim, "an SVD table", "use `PlainEmbedding`")
        self.v_scale = V_SCALE
        with arguments_as_flags(kind="`prior`"):
            self.prior_settings = Prior(prior, c1, c2, None if gamma is None else float(gamma))
            shape = self._prior_shape()
        self.U = nn.Parameter(torch.zeros(num_embeddings, embedding_dim))
        self.sigma = nn.Parameter(torch.ones(embedding_dim))
        self.V = nn.Parameter(self.v_scale * torch.eye(embedding_dim))
        # Checkpoints hold both buffers: s, without which U has no meaning, and the norm to which
        # an automatic c1 refers.
        self.register_buffer("scale", widened(torch.ones(())))
        self.register_buffer("initial_norm", widened(torch.ones(())))
        # With an automatic c1 the prior is this shape, of norm 1, times the initial norm.
        self.register_buffer("prior_shape", shape.to(self.U.device), persistent=False)
        self.start_norm = math.sqrt(counted) if frobenius_norm is None else float(frobenius_norm)
        self.reset_parameters()

    @classmethod
    def build(cls, spec: TableSpec, **options: Any) -> "SVDEmbedding":
        """A new table, with the Frobenius norm that a plain one would start with."""
        norm = None
        if spec.init_range is not None:
            counted = spec.num_embeddings - len({spec.padding_idx, *spec.excluded_rows})
            # The variance of a uniform distribution on [-r, r] is r^2 / 3.
            norm = spec.init_range * math.sqrt(counted * spec.embedding_dim / 3)
        return cls(*spec[:4], frobenius_norm=norm, **options)

    def reset_parameters(self) -> None:
        """Draw U uniformly among orthonormal matrices, set sigma to the prior and V to I.

        With V = I and a flat prior W is distributed as a plain table of orthogonal columns, and
        an optimiser that scales coordinates one by one (Adam) sees the same coordinates.
        """
        if self.U.is_meta:
            return
        self.initial_norm.fill_(self.start_norm)
        counted = self._counted_rows()
        # They are drawn on the CPU, so that a seed gives one table whatever the device.
        new: Any = {"device": "cpu", "dtype": self.scale.dtype}
        q, r = torch.linalg.qr(torch.randn(len(counted), self.embedding_dim, **new))
        q *= r.diagonal().sign()  # makes the distribution uniform
        u = torch.zeros(self.num_embeddings, self.embedding_dim, **new)
        u[counted] = q
        self._store(u, self.prior().cpu(), torch.eye(self.embedding_dim, **new))

    @torch.no_grad()
    def factor(self, weight: Tensor) -> Dict[str, Tensor]:
        """The state dict with which this table equals a dense one; deterministic.

        Returns:
            The five entries; an automatic c1 then refers to the norm of ``weight``.

        Raises:
            CheckpointError: every entry is zero, so that there is no scale.
        """
        check_finite(weight, "the table")
        dense = weight.detach().to("cpu", torch.float64)
        counted = self._counted_rows()
        u, sigma, v = _thin_svd(dense[counted])
        full = dense.new_zeros(dense.shape)
        if sigma[-1] > sigma[0] * max(dense.shape) * torch.finfo(torch.float64).eps:
            full[counted] = u
            excluded = self.excluded_rows.cpu()
            full[excluded] = dense[excluded] @ v / sigma
        else:
            # In a rank-deficient table, excluded rows may lie outside the span of the others. Only
            # a row of zeros needs no part in it, and padding is to stay one.
            kept = torch.ones(len(dense), dtype=torch.bool)
            if self.padding_idx is not None:
                kept[self.padding_idx] = bool(dense[self.padding_idx].any())
            full[kept], sigma, v = _thin_svd(dense[kept])
        if sigma[0] == 0:
            raise CheckpointError(
                "a table with factors", "only zeros", "Take the checkpoint of a trained model."
            )
        full[~dense.any(1)] = 0  # where products leave rounding errors, which have a direction
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
        rows = linear(features, (self.V / self.v_scale).t()) * self.sigma
        return rows, self._without_padding(self.U)

    def dense(self) -> Tensor:
        """The matrix W, shape (N, d), differentiable, computed anew at each call."""
        return F.linear(self._without_padding(self.U) * self.sigma, self.V / self.v_scale)

    @classmethod
    def dense_rows(cls, entries: Mapping[str, Tensor], rows: Tensor, dtype: torch.dtype) -> Tensor:
        """``rows`` of W = (U' sigma') (V'/v)', shape (n, d); see Note [Scales of the factors]."""
        sigma, v = entries["sigma"].double(), entries["V"].double() / V_SCALE
        return entries["U"][rows].to(dtype) @ (sigma.unsqueeze(1) * v.t()).to(dtype)

    @classmethod
    def measure_factors(cls, entries: Mapping[str, Tensor], excluded: Tensor) -> FactorMeasures:
        """How far the stored U and V are from orthonormal, and sigma as learned."""
        # In float64, since the squares of a damaged table's entries may be too large for float32.
        scale = entries["scale"].double()
        u = entries["U"]
        if not torch.isfinite(u[excluded]).all():
            u = u.index_fill(0, excluded, 0.0)
        orthogonality = {}
        for name, gram_matrix in (
            ("u", table_gram(u, excluded=excluded) / scale.square().clamp(min=_SMALLEST**2)),
            ("v", table_gram(entries["V"]) / V_SCALE**2),
        ):
            residual = identity_residual(gram_matrix)
            orthogonality[f"{name}_frobenius"] = float(frobenius_defect(residual).sqrt())
            orthogonality[f"{name}_spectral"] = float(spectral_defect(residual).sqrt())
        sigma = (entries["sigma"].double() * scale).abs().sort(descending=True).values
        return FactorMeasures(orthogonality, sigma, float(entries["initial_norm"]))

    def prior(self) -> Tensor:
        """The prior's singular values, largest first, float32, shape (d,)."""
        shape = self.prior_shape
        return shape * self.initial_norm if self.prior_settings.c1 is None else shape

    def chosen_options(self) -> Dict[str, Any]:
        """The values of the prior's options, by their arguments."""
        prior = self.prior_settings
        return {"prior": prior.kind, "c1": prior.c1, "c2": prior.c2, "gamma": prior.gamma}

    def singular_values(self) -> Tensor:
        """sigma as learned, float32, shape (d,): that of W as long as U and V are orthonormal."""
        return self.sigma.float() * self.scale

    def grams(self) -> Tuple[Tensor, Tensor]:
        """U'U over the rows that count and V'V, float32, each of shape (d, d)."""
        u_gram = gram(self.U.float(), self.excluded_rows) / self.scale.square()
        v_gram = gram(self.V.float()) / self.v_scale**2
        return u_gram, v_gram

    def extra_repr(self) -> str:
        """What ``print(model)`` shows in the brackets."""
        prior = self.prior_settings
        c1 = "auto" if prior.c1 is None else prior.c1
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, prior={prior.kind}, c1={c1}, "
            f"c2={prior.c2}, gamma={prior.gamma}"
        )

    def _counted_rows(self) -> Tensor:
        counted = rows_outside(self.num_embeddings, self.excluded_rows.cpu())
        return counted.nonzero().squeeze(1)

    @torch.no_grad()
    def _store(self, u: Tensor, sigma: Tensor, v: Tensor) -> None:
        scale = sigma.square().mean().sqrt()
        self.scale.copy_(scale)
        self.U.copy_(u * scale)
        self.sigma.copy_(sigma / scale)
        self.V.copy_(v * self.v_scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> "SVDEmbedding":
        # .half() and .bfloat16() convert every buffer, but these must keep their precision. The
        # third one, the prior's shape, is computed anew.
        exact = {name: getattr(self, name) for name in ("scale", "initial_norm")}
        super()._apply(fn, *args, **kwargs)
        for name, value in exact.items():
            device = getattr(self, name).device
            if value.is_meta:  # there is nothing to keep
                setattr(self, name, torch.empty_like(value, device=device))
            else:
                setattr(self, name, value.to(device))
        return self

    def _fill_constants(self) -> None:
        super()._fill_constants()
        device = self._device()
        if device.type != "meta":
            self.prior_shape = self._prior_shape().to(device)

    def _prior_shape(self) -> Tensor:
        return self.prior_settings.spectrum(self.embedding_dim, 1.0, dtype=torch.float32)


def _thin_svd(matrix: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """U (n, d), sigma (d,), largest first, and V (d, d) of a tall matrix, through its QR factor."""
    q, r = torch.linalg.qr(matrix)
    u, sigma, vh = torch.linalg.svd(r)
    return q @ u, sigma, vh.t()
