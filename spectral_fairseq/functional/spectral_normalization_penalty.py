"""Spectral normalisation as a penalty, which pulls every singular value to the largest one.

Jiang, Chen, Chen, Liu, Wang, Zhao: "On Computation and Generalization of Generative Adversarial
Networks under Spectrum Control", ICLR 2019, https://openreview.net/forum?id=rJNH6sAqY7, divide
the spectrum of a weight by its largest value, sigma_k / max sigma. Appendix B of Wang et al.
compares with it and describes its effect: "encourage all the singular values close to the largest
one".

Note [Spectral normalisation with a weight]
-------------------------------------------
A normalisation has no weight, but a penalty needs one. Dividing a whole table by its largest
singular value would also fix the scale of the logits at every step, which could not be combined
with a plain checkpoint or with any other penalty. The penalty is therefore the squared distance
of the normalised spectrum from the flat one,

    R = sum_k (1 - sigma_k / sigma_1)^2

It is zero exactly where appendix B says that the method leads. It depends on the spectrum only
through the paper's sigma / max sigma and therefore, like a normalised weight, not on the scale of
the table. The appendix's second comparator, "SN + D-optimal", is the sum of this and
:func:`d_optimal_penalty`.

Flags: ``--spectral-normalization-weight`` 0.
In order: ``methods/penalties.py: output_singular_values``, ``spectral_normalization_penalty``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def spectral_normalization_penalty(sigma: Tensor) -> Tensor:
    """Return R = sum_k (1 - |sigma_k| / max |sigma|)^2.

    See Note [Spectral normalisation with a weight].

    Args:
        sigma: singular values in any order and of any sign, shape (d,): the learned ones of an SVD
            table, or those of
            :func:`~spectral_fairseq.functional.spectra.singular_values`.

    Returns:
        Scalar between 0 (all values equal) and d - 1 (rank one). A zero spectrum gives d and
        finite gradients.
    """
    values = sigma.abs()
    largest = values.max()
    return (1 - values / torch.where(largest > 0, largest, torch.ones_like(largest))).square().sum()
