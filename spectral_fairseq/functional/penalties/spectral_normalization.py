"""Spectral normalisation as a penalty: every singular value drawn to the largest one.

Jiang, Chen, Chen, Liu, Wang, Zhao: "On Computation and Generalization of GANs under Spectrum
Control", ICLR 2019, divides the spectrum of a weight by its largest value, sigma_k / max sigma.
Wang et al., ICLR 2020, appendix B, compare with it and describe what it does: "encourage all the
singular values close to the largest one".

Note [Spectral normalisation with a weight]
-------------------------------------------
A normalisation has no strength; a penalty must. Dividing a whole table by its largest singular
value would moreover fix the scale of the logits at every step, which no plain checkpoint and no
other penalty could be combined with. The penalty is therefore the squared distance of the
normalised spectrum from the flat one,

    R = sum_k (1 - sigma_k / sigma_1)^2

which is zero exactly where appendix B says the method leads, depends on the spectrum only through
the paper's sigma / max sigma, and so, like a normalised weight, does not depend on the scale of
the table. The appendix's second comparator, "SN + D-optimal", is the sum of this and
:mod:`spectral_fairseq.functional.penalties.d_optimal`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def spectral_normalization_penalty(sigma: Tensor) -> Tensor:
    """R = sum_k (1 - |sigma_k| / max |sigma|)^2.

    See Note [Spectral normalisation with a weight].

    Args:
        sigma: singular values in any order and of any sign, shape (d,): learned ones of an SVD
            table, or :func:`spectral_fairseq.functional.linalg.singular_values.singular_values`.

    Returns:
        Scalar from 0, all equal, to d - 1, rank one. A zero spectrum gives d and finite
        gradients.
    """
    values = sigma.abs()
    largest = values.max()
    return (1 - values / torch.where(largest > 0, largest, torch.ones_like(largest))).square().sum()
