"""One step of the decoupled control by torch's own decomposition, value by value, in float64."""

import torch

from tests.reference.orthogonality import without_rows


def controlled(weight, prior, rate, side, slack, scale, centering=0.0, excluded=()):
    weight = weight.double().clone()
    kept = [i for i in range(weight.size(0)) if i not in set(excluded)]
    rows = without_rows(weight, excluded)
    rows = rows - centering * rows.mean(0)
    u, sigma, vh = torch.linalg.svd(rows, full_matrices=False)
    size = sum(s**2 for s in sigma.tolist()) ** 0.5
    factor = size / sum(p**2 for p in prior.tolist()) ** 0.5 if scale == "free" else 1.0
    new = []
    for s, p in zip(sigma.tolist(), prior.tolist()):
        target = factor * p
        if side == "above":
            target = min(s, slack * target)
        new.append(s + rate * (target - s))
    if (side, scale) == ("both", "free"):
        longer = size / sum(s**2 for s in new) ** 0.5
        new = [longer * s for s in new]
    weight[kept] = u @ torch.diag(torch.tensor(new, dtype=torch.float64)) @ vh
    return weight
