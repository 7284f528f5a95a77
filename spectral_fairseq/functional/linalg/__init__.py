"""Matrix products, Gram matrices, row norms and singular values, shared by the other functions."""

from spectral_fairseq.functional.linalg.blockwise_spectrum import BlockwiseSpectrum
from spectral_fairseq.functional.linalg.gram import accumulate_gram, gram, mirror_gram
from spectral_fairseq.functional.linalg.products import matmul_transposed
from spectral_fairseq.functional.linalg.row_norms import rms_row_norm, row_norms, unit_rows
from spectral_fairseq.functional.linalg.singular_values import (
    right_singular_system,
    right_singular_system_of_gram,
    singular_values,
    singular_values_of_gram,
)

__all__ = [
    "BlockwiseSpectrum",
    "accumulate_gram",
    "gram",
    "matmul_transposed",
    "mirror_gram",
    "right_singular_system",
    "right_singular_system_of_gram",
    "rms_row_norm",
    "row_norms",
    "singular_values",
    "singular_values_of_gram",
    "unit_rows",
]
