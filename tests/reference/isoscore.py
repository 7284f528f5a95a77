"""IsoScore of a cloud of points, step by step as in its paper, float64."""

import torch


def isoscore(points):
    points = points.double()
    count, n = points.shape
    centred = points - points.mean(0)
    covariance = sum(torch.outer(row, row) for row in centred) / (count - 1)
    # Reorient by PCA: the covariance of the new points is diagonal.
    _, axes = torch.linalg.eigh(covariance)
    reoriented = centred @ axes
    diagonal = torch.tensor([float(column @ column) / (count - 1) for column in reoriented.t()],
                            dtype=torch.float64)  # fmt: skip
    normalised = n**0.5 * diagonal / diagonal.norm()
    defect = float((normalised - 1).norm()) / (2 * (n - n**0.5)) ** 0.5
    used = (n - defect**2 * (n - n**0.5)) ** 2 / n**2
    return (n * used - 1) / (n - 1)
