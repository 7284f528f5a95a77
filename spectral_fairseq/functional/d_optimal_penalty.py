"""The D-optimal regulariser, which enlarges the volume that the columns of a table span.

Jiang, Chen, Chen, Liu, Wang, Zhao: "On Computation and Generalization of Generative Adversarial
Networks under Spectrum Control", ICLR 2019, https://openreview.net/forum?id=rJNH6sAqY7; a
comparator in appendix B of Wang et al., ICLR 2020, https://openreview.net/forum?id=ByxY8CNtvr:

    R = -sum_k log sigma_k = -1/2 log det(W'W),     dR/dW = -W (W'W)^-1

Jiang et al. take the spectrum of a weight that is divided by its largest singular value:

    R = -sum_k log(sigma_k / sigma_1)

Flags: ``--d-optimal-weight`` 0, ``--normalized-d-optimal-weight`` 0.
In order: ``methods/penalties.py: output_singular_values``, ``d_optimal_penalty`` or
    ``normalized_d_optimal_penalty``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def d_optimal_penalty(sigma: Tensor) -> Tensor:
    """Return R = -sum_k log |sigma_k|.

    R has no minimum: it falls by d log c for a table c times as large. Weight decay, a
    spectral-norm table or another penalty has to bound it; the form that Jiang et al. use is
    :func:`normalized_d_optimal_penalty`.

    Args:
        sigma: singular values in any order and of any sign, shape (d,): the learned ones of an SVD
            table, or those of
            :func:`~spectral_fairseq.functional.spectra.singular_values`. Values
            below machine epsilon times the largest count as that bound and receive no gradient, so
            that R stays finite where the rank is not full.

    Returns:
        Scalar.
    """
    values = sigma.abs()
    info = torch.finfo(values.dtype)
    floor = (values.detach().max() * info.eps).clamp(min=info.tiny)
    return -torch.maximum(values, floor).log().sum()


def normalized_d_optimal_penalty(sigma: Tensor) -> Tensor:
    """Return R = -sum_k log(|sigma_k| / max |sigma|), which does not depend on the table's scale.

    Args:
        sigma: as for :func:`d_optimal_penalty`. A share below machine epsilon counts as that bound.

    Returns:
        Scalar of at least 0, which is reached where all values are equal.
    """
    values, info = sigma.abs(), torch.finfo(sigma.dtype)
    shares = values / values.max().clamp(min=info.tiny)
    # A share at the bound is a constant: it pulls at neither sigma_k nor sigma_1.
    return -shares.clamp(min=info.eps).log().sum()
