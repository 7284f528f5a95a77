"""The penalties that every criterion of this package takes, one declaration a file.

``docs/adding_a_penalty.md`` shows how to add one.
"""

from spectral_fairseq.plugin.criterions.penalties.cosine import COSINE
from spectral_fairseq.plugin.criterions.penalties.d_optimal import D_OPTIMAL, NORMALIZED_D_OPTIMAL
from spectral_fairseq.plugin.criterions.penalties.mean_vector import MEAN_VECTOR
from spectral_fairseq.plugin.criterions.penalties.orthogonality import ORTHOGONALITY
from spectral_fairseq.plugin.criterions.penalties.spectral_normalization import (
    SPECTRAL_NORMALIZATION,
)
from spectral_fairseq.plugin.criterions.penalties.spectrum import SPECTRUM
from spectral_fairseq.plugin.criterions.penalties.weight_norm import WEIGHT_NORM

# In the order of the training logs and of docs/flags.md.
PENALTIES = (
    COSINE,
    SPECTRUM,
    ORTHOGONALITY,
    WEIGHT_NORM,
    SPECTRAL_NORMALIZATION,
    NORMALIZED_D_OPTIMAL,
    D_OPTIMAL,
    MEAN_VECTOR,
)
