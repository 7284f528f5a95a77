"""The four orthogonality terms with torch's own matrix norms, on a copy without excluded rows."""

import torch


def without_rows(matrix, excluded):
    keep = [i for i in range(matrix.size(0)) if i not in set(excluded)]
    return matrix.double()[keep]


def defects(matrix):
    matrix = matrix.double()
    residual = matrix.t() @ matrix - torch.eye(matrix.size(1), dtype=torch.float64)
    return (
        torch.linalg.matrix_norm(residual, "fro") ** 2,
        torch.linalg.matrix_norm(residual, 2) ** 2,
    )


def penalty(u, v, weights):
    u_frobenius, u_spectral = defects(u)
    v_frobenius, v_spectral = defects(v)
    return (
        weights[0] * u_frobenius
        + weights[1] * v_frobenius
        + weights[2] * u_spectral
        + weights[3] * v_spectral
    )
