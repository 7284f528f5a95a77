"""Penalties on tables, spectra and activations."""

from spectral_fairseq.functional.penalties.activation_regularization import (
    activation_regularization,
    temporal_activation_regularization,
)
from spectral_fairseq.functional.penalties.cosine import cosine_penalty
from spectral_fairseq.functional.penalties.d_optimal import (
    d_optimal_penalty,
    normalized_d_optimal_penalty,
)
from spectral_fairseq.functional.penalties.mean_vector import mean_vector_penalty
from spectral_fairseq.functional.penalties.orthogonality import (
    frobenius_defect,
    identity_residual,
    orthogonality_penalty,
    spectral_defect,
)
from spectral_fairseq.functional.penalties.spectral_normalization import (
    spectral_normalization_penalty,
)
from spectral_fairseq.functional.penalties.spectrum import PRIORS, prior_spectrum, spectrum_penalty
from spectral_fairseq.functional.penalties.weight_norm import log_count_target, weight_norm_penalty

__all__ = [
    "PRIORS",
    "activation_regularization",
    "cosine_penalty",
    "d_optimal_penalty",
    "normalized_d_optimal_penalty",
    "frobenius_defect",
    "identity_residual",
    "log_count_target",
    "mean_vector_penalty",
    "orthogonality_penalty",
    "prior_spectrum",
    "spectral_defect",
    "spectral_normalization_penalty",
    "spectrum_penalty",
    "temporal_activation_regularization",
    "weight_norm_penalty",
]
