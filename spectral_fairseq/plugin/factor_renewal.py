"""``--svd-interval``: new factors for an SVD table, in the weights and in the optimiser's state.

What an optimiser remembers of gradients belongs to the factors that they were taken for. Averages
of gradients are carried over as gradients are, averages of squares as those of independent
gradients. Averages of the weights cannot be: a mean of factors of different decompositions is no
factor of anything.
"""

from __future__ import annotations

from typing import Any, Dict

import torch
from torch import Tensor

from spectral_fairseq import refusals
from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.functional.factor_renewal import redecomposition, singular_system
from spectral_fairseq.functional.row_blocks import multiply_
from spectral_fairseq.functional.workers import Workers
from spectral_fairseq.plugin.trained_weights import moments, trained_weights

# Names in the states of fairseq's optimisers. A momentum is a sum of gradients. The second moments
# of Adafactor's rows do not change when the columns are rotated.
_GRADIENTS = frozenset({"exp_avg", "momentum_buffer"})
_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_col", "sum"})
UNROTATED = frozenset({"exp_avg_sq_row"})


@torch.no_grad()
def renew_factors(table: SVDEmbedding, optimizer: Any, group: Any = None) -> None:
    """Make the factors of a table the singular value decomposition of the same W.

    A table with a singular value of zero keeps its factors, and so does one with a frozen factor.

    Args:
        table: the table as the model holds it.
        optimizer: the optimiser as the trainer holds it.
        group: process group of the workers, of which the first one plans; ``None`` is all of them.

    Raises:
        DataError: a factor with infinity or NaN in it; nothing is written.
    """
    factors = {"u": table.U, "sigma": table.sigma, "v": table.V}
    if not all(factor.requires_grad for factor in factors.values()):
        return
    weights = {name: trained_weights(optimizer, factor) for name, factor in factors.items()}
    u, sigma, v = weights["u"], weights["sigma"], weights["v"].double() / table.v_scale
    workers = Workers(group)
    system = singular_system(u, sigma, v, table.excluded_rows) if workers.plans else None
    system = workers.share(system, (v.size(0) + 1, v.size(1)), v.device)
    new = redecomposition(sigma, v, system, float(table.scale))
    if new is None:
        return
    state = {key: moments(optimizer, factor) for key, factor in factors.items()}
    of_sigma_alone = _gradient_of_sigma_alone(state["sigma"], state["u"], u, sigma)
    multiply_(u, new.u_map)
    sigma.copy_(new.sigma)
    weights["v"].copy_(new.vectors * table.v_scale)
    for key, factor in factors.items():
        if factor.data_ptr() != weights[key].data_ptr():
            factor.copy_(weights[key])

    for key, gradient in (("u", new.u_gradient), ("v", new.v_gradient)):
        for name, moment in state[key].items():
            _carry_over(name, moment, gradient)
    for name, moment in state["sigma"].items():
        if name in of_sigma_alone:
            through_table = _gradient_through_table(state["u"][name], u, new.sigma)
            moment.copy_(through_table + of_sigma_alone[name] @ new.v_gradient.square())
        else:
            _carry_over(name, moment.view(1, -1), new.v_gradient)


def _carry_over(name: str, moment: Tensor, gradient: Tensor) -> None:
    """Multiply a moment by the map of the gradients, or by the map of their squares."""
    if name in _GRADIENTS:
        multiply_(moment, gradient)
    elif name in _SQUARES:
        multiply_(moment.view(-1, gradient.size(0)), gradient.square())
    elif name not in UNROTATED:
        raise refusals.RENEWAL.error(f"an optimiser that keeps {name}")


def _gradient_of_sigma_alone(
    state: Dict[str, Tensor], of_u: Dict[str, Tensor], u: Tensor, sigma: Tensor
) -> Dict[str, Tensor]:
    """The part of sigma's averages of gradients that did not come through W, in float64.

    It is that of penalties and of weight decay, which act on sigma alone.
    """
    return {
        name: moment.double() - _gradient_through_table(of_u[name], u, sigma)
        for name, moment in state.items()
        if name in _GRADIENTS
    }


def _gradient_through_table(moment: Tensor, u: Tensor, sigma: Tensor) -> Tensor:
    """diag(U' G_U) / sigma, in float64: what reaches sigma through W."""
    # In the dtype of the moments and without a copy of U.
    return torch.einsum("nk,nk->k", u.to(moment.dtype), moment).double() / sigma.double()
