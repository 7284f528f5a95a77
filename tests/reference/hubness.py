"""Hubness from all cosines, row by row, float64."""

import torch


def hubness(rows, neighbours):
    rows = rows.double()
    times = [0] * len(rows)
    for i in range(len(rows)):
        cosines = torch.cosine_similarity(rows[i : i + 1], rows)
        cosines[i] = -2
        for j in cosines.argsort(descending=True)[:neighbours].tolist():
            times[j] += 1
    mean = sum(times) / len(times)
    spread = (sum((t - mean) ** 2 for t in times) / len(times)) ** 0.5
    return sum(((t - mean) / spread) ** 3 for t in times) / len(times)
