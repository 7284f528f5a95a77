"""The distance of the word vectors' norms from a target: Herold et al., WMT 2018, equation 12.

https://aclanthology.org/W18-6310
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from spectral_fairseq.functional.row_penalties import log_count_target, weight_norm_penalty
from spectral_fairseq.plugin.criterions.penalties.needs import RowNorms, Words, row_norms
from spectral_fairseq.plugin.criterions.penalties.penalty import Penalty
from spectral_fairseq.plugin.criterions.penalties.per_device import PerDevice
from spectral_fairseq.plugin.flags import Flag, finite_nonnegative, weight_flag


def _with_targets(options: Any, words: Words) -> Any:
    """Options whose target is a constant: a scalar, or one number for each word, shape (N,)."""
    target = torch.tensor(options.weight_norm_target)
    if options.weight_norm_target_by_count:
        target = log_count_target(words.log_counts, options.weight_norm_target, words.excluded)
    return SimpleNamespace(**{**vars(options), "weight_norm_target": PerDevice(target)})


def _value(rows: RowNorms, options: Any) -> Tensor:
    target = options.weight_norm_target.on(rows.norms.device)
    return weight_norm_penalty(rows.norms, target, rows.excluded)


WEIGHT_NORM = Penalty(
    name="weight_norm",
    weight=weight_flag("weight_norm_weight", "rho: weight of sqrt(sum_j (||W_j|| - nu)^2)"),
    settings=(
        Flag(
            "weight_norm_target",
            2.0,
            "nu: the norm to which word vectors are pulled",
            finite_nonnegative,
        ),
        Flag(
            "weight_norm_target_by_count",
            False,
            "give each word a target of its own, proportional to its smoothed log count, with "
            "mean nu",
        ),
    ),
    for_words=_with_targets,
    needs=row_norms,
    value=_value,
)
