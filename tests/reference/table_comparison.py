"""Linear CKA and the Procrustes residual, written out on whole float64 matrices."""

import torch


def centred(rows):
    return rows.double() - rows.double().mean(0)


def linear_cka(left, right):
    a, b = centred(left), centred(right)
    one, other = a @ a.t(), b @ b.t()  # the similarities of words, as in the definition of CKA
    return float((one * other).sum() / (one.norm() * other.norm()))


def procrustes_residual(left, right):
    """The rotation is built and applied."""
    a, b = centred(left), centred(right)
    u, _, vh = torch.linalg.svd(a.t() @ b, full_matrices=False)
    rotated = a @ u @ vh
    scale = float((rotated * b).sum() / rotated.square().sum())
    return float((scale * rotated - b).norm() / b.norm())
