"""The penalties on a table by name, as direct forms on the rows W that count, shape (N, d)."""

import torch
from torch.nn.functional import normalize

# That of spectrum_c1 = 2 and spectrum_c2 = 0.1; with nu = 2.
PRIOR = 2.0 * torch.exp(-0.1 * torch.arange(1, 17, dtype=torch.float64))


def _sigma(w):
    return torch.linalg.svdvals(w)


# Of a table without factors; that on the factors of an SVD table is in reference/spectra.py.
PENALTIES = {
    "cosine": lambda w: (normalize(w).sum(0).square().sum() - len(w)) / len(w) ** 2,
    "spectrum": lambda w: (_sigma(w) - PRIOR[: w.size(1)]).square().sum(),
    "weight_norm": lambda w: (w.norm(dim=1) - 2.0).square().sum().sqrt(),
    "spectral_normalization": lambda w: (1 - _sigma(w) / _sigma(w)[0]).square().sum(),
    "normalized_d_optimal": lambda w: -(_sigma(w) / _sigma(w)[0]).log().sum(),
    "d_optimal": lambda w: -_sigma(w).log().sum(),
}
