"""The distance of singular values from a prior: Wang et al., ICLR 2020, section 4.2.

https://openreview.net/forum?id=ByxY8CNtvr

An SVD table has its singular values, and its prior, as parts; of any other output table they are
those of W itself, and the gradient is W V diag(2 (sigma - prior) / sigma) V'.
"""

from types import SimpleNamespace
from typing import Any, Callable, List, NamedTuple, Optional, Union

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.spectrum_penalties import spectrum_penalty
from spectral_fairseq.plugin.criterions.penalties.needs import (
    ModelView,
    Words,
    output_table,
    singular_values,
    svd_tables,
)
from spectral_fairseq.plugin.criterions.penalties.penalty import Penalty
from spectral_fairseq.plugin.criterions.table_prior import FLAGS, TablePrior
from spectral_fairseq.plugin.flags import Flag, finite_nonnegative
from spectral_fairseq.plugin.models.output_table import decoder_of, has_svd_table


class Spectrum(NamedTuple):
    """The singular values of a table, and its prior where it knows one.

    Args:
        sigma: shape (d,).
        prior: shape (d,); of a table without factors a function of the criterion's flags.
    """

    sigma: Tensor
    prior: Union[Tensor, Callable[[TablePrior], Tensor]]


def check_rank(weight: Tensor, excluded: Tensor) -> None:
    """Refuse a table with fewer counted rows than dimensions, which has no d singular values.

    Raises:
        ConfigurationError: N < d.
    """
    counted = weight.size(0) - excluded.numel()
    if counted < weight.size(1):
        raise ConfigurationError(
            "at least as many words as dimensions (N >= d) for `weight`",
            f"N = {counted} words, padding and made-up rows left out, and d = {weight.size(1)}",
            "Use a narrower table, a larger dictionary, or drop `weight`.",
        )


def spectra(view: ModelView) -> List[Spectrum]:
    """The learned spectrum of each SVD table, or the true one of the output table without any."""
    if has_svd_table(view.module):
        return [Spectrum(table.singular_values(), table.prior()) for table in svd_tables(view)]
    weight, excluded = view.get(output_table)
    check_rank(weight, excluded)
    owner = decoder_of(view.module)
    return [Spectrum(view.get(singular_values), lambda flags: flags(owner, weight, excluded))]


def _with_prior(options: Any, _: Words) -> Any:
    return SimpleNamespace(**vars(options), table_prior=TablePrior(options))


def _value(found: List[Spectrum], options: Any) -> Tensor:
    terms = []
    for sigma, prior in found:
        target = prior(options.table_prior).to(sigma) if callable(prior) else prior
        terms.append(spectrum_penalty(sigma, target))
    return torch.stack(terms).sum()


SPECTRUM = Penalty(
    name="spectrum",
    weight=Flag(
        "spectrum_weight",
        0.0,
        "lambda_e or lambda_p: weight of sum_k (sigma_k - prior_k)^2, of an SVD table's sigma or "
        "of the true singular values of any other output table",
        finite_nonnegative,
        Optional[float],
    ),
    settings=FLAGS,
    for_words=_with_prior,
    needs=spectra,
    value=_value,
    # Of an SVD table it takes d numbers.
    lazy=lambda view: not has_svd_table(view.module),
)
