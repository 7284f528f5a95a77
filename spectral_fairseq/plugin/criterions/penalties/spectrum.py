"""The distance of learned singular values from a prior: Wang et al., ICLR 2020, section 4.2.

https://openreview.net/forum?id=ByxY8CNtvr
"""

import torch

from spectral_fairseq.functional.penalties.spectrum import spectrum_penalty
from spectral_fairseq.plugin.criterions.penalties.needs import svd_tables
from spectral_fairseq.plugin.criterions.penalties.penalty import Penalty
from spectral_fairseq.plugin.flags import weight_flag

SPECTRUM = Penalty(
    name="spectrum",
    weight=weight_flag(
        "spectrum_weight",
        "lambda_e or lambda_p: weight of sum_k (sigma_k - prior_k)^2 of an SVD table",
    ),
    needs=svd_tables,
    value=lambda tables, _: torch.stack(
        [spectrum_penalty(table.singular_values(), table.prior()) for table in tables]
    ).sum(),
    lazy=False,  # it takes d numbers of a table
)
