"""The D-optimal regulariser: the volume that the columns of a table span.

Jiang, Chen, Chen, Liu, Wang, Zhao: "On Computation and Generalization of GANs under Spectrum
Control", ICLR 2019; a comparator in appendix B of Wang et al., ICLR 2020:

    R = -sum_k log sigma_k = -1/2 log det(W'W),     dR/dW = -W (W'W)^-1
"""

from __future__ import annotations

import torch
from torch import Tensor


def d_optimal_penalty(sigma: Tensor) -> Tensor:
    """R = -sum_k log |sigma_k|.

    It has no minimum: it falls by d log c for a table c times as large. Jiang et al. add it to a
    normalised spectrum; here decay of the weights, or another penalty, has to bound it.

    Args:
        sigma: singular values in any order and of any sign, shape (d,): learned ones of an SVD
            table, or :func:`~functional.linalg.singular_values.singular_values`. Those
            below machine epsilon times the largest count as that much and receive no gradient:
            R stays finite where the rank is not full.

    Returns:
        Scalar.
    """
    values = sigma.abs()
    info = torch.finfo(values.dtype)
    floor = (values.detach().max() * info.eps).clamp(min=info.tiny)
    return -torch.maximum(values, floor).log().sum()
