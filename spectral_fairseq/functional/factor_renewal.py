"""New factors for an unchanged table: the singular value decomposition of W = U diag(sigma) V'.

Training moves the factors (Wang et al., equation 4.1) away from orthonormal ones, and sigma is
then no longer what it is called. They can be renewed while W stays as it is. With
M = diag(sigma) V',

    W = U M,   M' U'U M = E diag(sigma_1^2) E',   U_1 = U M E diag(1 / sigma_1),   V_1 = E

costs the Gram matrix of U and one product of N x d with d x d. The gradients of the old factors
determine those of the new ones. With G_W, the gradient of W,

    G_U = G_W M',   G_V = G_W' U diag(sigma),   G_sigma = diag(U' G_W V),
    G_U1 = G_U M'^-1 E diag(sigma_1),   G_V1 = G_V V'E,   G_sigma1 = diag(U_1' G_U1) / sigma_1,

exact for a gradient that was taken at the present factors. An average of gradients, such as
Adam's first moment, holds those of earlier factors, so it is carried over to first order in what
they have moved since the last renewal. After ten updates of Adam of a softmax over 2,000 words
with d = 64, the averages of U, sigma and V are 0.5, 0.6 and 6 % off at a learning rate of 1e-3,
and 5, 5 and 65 % at 1e-2. A penalty on sigma, and weight decay, have a gradient g of their own
there. A step along it changes W by U diag(g) V', in which the new factors see g (V'E)^2, with the
squares of the entries, for orthonormal U and equal sigma, so this too holds to first order.

Second moments are carried over as those of independent gradients, with the squares of the
coefficients. Adam then scales its steps along the singular directions of the table rather than
along fixed coordinates, as SOAP does with every matrix (Vyas et al.,
https://arxiv.org/abs/2409.11321).

Flags: ``--svd-interval`` 0.
In order: ``plugin/factor_renewal.py: renew_factors``, ``singular_system``, ``redecomposition``.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from spectral_fairseq.functional.gram import table_gram
from spectral_fairseq.functional.spectra import require_finite, right_singular_system_of_gram


class Redecomposition(NamedTuple):
    """How new factors follow from the old ones.

    Args:
        sigma: the new one, largest first, shape (d,).
        vectors: the new V, shape (d, d).
        u_map: shape (d, d); the new U is the old one times this.
        u_gradient: shape (d, d); the gradient of the new U is that of the old one times this.
        v_gradient: shape (d, d), the same of V.
    """

    sigma: Tensor
    vectors: Tensor
    u_map: Tensor
    u_gradient: Tensor
    v_gradient: Tensor


@torch.no_grad()
def singular_system(
    u: Tensor, sigma: Tensor, v: Tensor, excluded: Optional[Tensor] = None
) -> Tensor:
    """The singular values and right singular vectors of W = U diag(sigma) V'.

    Args:
        u: U, shape (N, d).
        sigma: shape (d,).
        v: V, shape (d, d).
        excluded: rows that are not counted, shape (m,).

    Returns:
        Float64, shape (d + 1, d): sigma_1 in the first row, zero where it cannot be told from zero,
        and E below it. One tensor, so that one worker can compute it for all. NaN throughout for
        factors with infinity or NaN in them.
    """
    inner = table_gram(u, excluded=excluded)
    right = sigma.double().unsqueeze(1) * v.double().t()
    gram = right.t() @ inner @ right
    if not torch.isfinite(gram).all():  # which no eigensolver takes
        return gram.new_full((gram.size(0) + 1, gram.size(0)), float("nan"))
    values, vectors = right_singular_system_of_gram(gram, u.size(0))
    return torch.cat([values[None], vectors])


def redecomposition(
    sigma: Tensor, v: Tensor, system: Tensor, scale: float = 1.0
) -> Optional[Redecomposition]:
    """The maps from the old factors to the new ones.

    Args:
        sigma: the old one, shape (d,).
        v: the old V, shape (d, d).
        system: of :func:`singular_system`.
        scale: length that the columns of U are to have; sigma is that much smaller.

    Returns:
        Float64; ``None`` if a singular value is zero, since U is then not determined.

    Raises:
        DataError: the system is that of factors with infinity or NaN in them.
    """
    new_sigma, vectors = system[0] / scale, system[1:]
    require_finite(system, "the factors of an SVD table")
    if not new_sigma[-1] > 0:
        return None
    old = sigma.double().unsqueeze(1) * v.double().t()  # M
    new = new_sigma.unsqueeze(1) * vectors.t()
    return Redecomposition(
        sigma=new_sigma,
        vectors=vectors,
        u_map=old @ vectors / new_sigma,
        u_gradient=torch.linalg.solve(old.t(), new.t()),
        v_gradient=v.double().t() @ vectors,
    )
