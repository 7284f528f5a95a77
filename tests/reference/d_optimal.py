"""The D-optimal regulariser by way of the determinant."""

import torch


def penalty(matrix):
    matrix = matrix.double()
    return -0.5 * torch.logdet(matrix.t() @ matrix)


def gradient(matrix):
    matrix = matrix.double()
    return -matrix @ torch.linalg.inv(matrix.t() @ matrix)
