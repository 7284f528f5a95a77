"""``--svd-interval``: new factors for an SVD table, in the weights and in the optimiser's state.

What an optimiser remembers of gradients belongs to the factors that they were taken for. Averages
of gradients are carried over as gradients are, averages of squares as those of independent
gradients. Averages of the weights cannot be: a mean of factors of different decompositions is no
factor of anything.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict

import torch
from torch import Tensor

from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.errors import UnsupportedError
from spectral_fairseq.functional.table_control import multiply_, redecomposition, singular_system
from spectral_fairseq.plugin.criterions.table_control import SVD_INTERVAL
from spectral_fairseq.plugin.hooks.trained import moments, trained_weights

# Names in the states of fairseq's optimisers. A momentum is a sum of gradients. The second moments
# of Adafactor's rows do not change when the columns are rotated.
_GRADIENTS = frozenset({"exp_avg", "momentum_buffer"})
_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_col", "sum"})
_OF_ROWS = frozenset({"exp_avg_sq_row"})
# Through U, a plain gradient step changes W by a gradient times V sigma^2 V': large directions grow
# fastest, and factors that are renewed follow them. An AWD-LSTM trained by SGD at a rate of 3 ends
# with a table of rank one, and 0.98 bits behind one whose factors are left alone.
_LOSES_RANK = ("nag", "sgd")
OPTIMIZERS = ("adafactor", "adagrad", "adam", "coupled_adam", "lamb", "nag", "sgd")


def check_optimizer(cfg: Any) -> None:
    """Refuse optimisers whose state cannot be carried over, and averages of the weights.

    Args:
        cfg: fairseq's configuration.

    Raises:
        UnsupportedError: the message says which flag is in the way.
    """
    expected = f"an optimiser whose state can be carried over, for {SVD_INTERVAL.option}"
    name = cfg.optimizer._name
    if name not in OPTIMIZERS:
        raise UnsupportedError(
            expected, f"--optimizer {name}", f"Use one of {', '.join(OPTIMIZERS)}."
        )
    if getattr(cfg.optimizer, "fp16_adam_stats", False):
        raise UnsupportedError(expected, "--fp16-adam-stats, which scales it", "Remove it.")
    if cfg.distributed_training.zero_sharding != "none":
        raise UnsupportedError(
            expected,
            f"--zero-sharding {cfg.distributed_training.zero_sharding}, which splits it",
            "Remove it.",
        )
    if getattr(getattr(cfg, "ema", None), "store_ema", False):
        raise UnsupportedError(
            f"no averages of the weights, for {SVD_INTERVAL.option}",
            "--store-ema, which would average factors of different decompositions",
            "Remove it; `spectral-fairseq average` averages tables instead.",
        )


def check_steps(cfg: Any) -> None:
    """Refuse optimisers under which renewed factors lose their rank.

    Args:
        cfg: fairseq's configuration.

    Raises:
        UnsupportedError: the message says which optimiser it is.
    """
    if cfg.optimizer._name in _LOSES_RANK:
        raise UnsupportedError(
            f"an optimiser that scales its steps, for {SVD_INTERVAL.option}",
            f"--optimizer {cfg.optimizer._name}",
            "Use Adam, or a plain table.",
        )


@torch.no_grad()
def renew_factors(
    table: SVDEmbedding, optimizer: Any, agreed: Callable[[Callable[[], Tensor], Tensor], Tensor]
) -> None:
    """Make the factors of a table the singular value decomposition of the same W.

    A table with a singular value of zero keeps its factors, and so does one with a frozen factor.

    Args:
        table: as the model holds it.
        optimizer: as the trainer holds it.
        agreed: takes a function and a tensor of the shape and dtype of its result, and returns
            the first worker's result on every worker.

    Raises:
        DataError: a factor with infinity or NaN in it; nothing is written.
    """
    factors = {"u": table.U, "sigma": table.sigma, "v": table.V}
    if not all(one.requires_grad for one in factors.values()):
        return
    weights = {name: trained_weights(optimizer, one) for name, one in factors.items()}
    u, sigma, v = weights["u"], weights["sigma"], weights["v"].double() / table.v_scale
    plan = functools.partial(singular_system, u, sigma, v, table.excluded_rows)
    like = torch.empty(v.size(0) + 1, v.size(1), dtype=torch.float64, device=v.device)
    new = redecomposition(sigma, v, agreed(plan, like), float(table.scale))
    if new is None:
        return
    state = {key: moments(optimizer, factor) for key, factor in factors.items()}
    own = _of_sigma_alone(state["sigma"], state["u"], u, sigma)
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
        if name in own:
            through_table = _of_u(state["u"][name], u, new.sigma)
            moment.copy_(through_table + own[name] @ new.v_gradient.square())
        else:
            _carry_over(name, moment.view(1, -1), new.v_gradient)


def _carry_over(name: str, moment: Tensor, gradient: Tensor) -> None:
    """Multiply a moment by the map of the gradients, or by the map of their squares."""
    if name in _GRADIENTS:
        multiply_(moment, gradient)
    elif name in _SQUARES:
        multiply_(moment.view(-1, gradient.size(0)), gradient.square())
    elif name not in _OF_ROWS:
        raise UnsupportedError(
            f"an optimiser whose state can be carried over, for {SVD_INTERVAL.option}",
            f"one that keeps {name}",
            f"Set {SVD_INTERVAL.option} to 0.",
        )


def _of_sigma_alone(
    state: Dict[str, Tensor], of_u: Dict[str, Tensor], u: Tensor, sigma: Tensor
) -> Dict[str, Tensor]:
    """The part of sigma's averages of gradients that did not come through W, in float64.

    It is that of penalties and of weight decay, which act on sigma alone.
    """
    return {
        name: moment.double() - _of_u(of_u[name], u, sigma)
        for name, moment in state.items()
        if name in _GRADIENTS
    }


def _of_u(moment: Tensor, u: Tensor, sigma: Tensor) -> Tensor:
    """diag(U' G_U) / sigma, in float64: what reaches sigma through W."""
    # In the dtype of the moments and without a copy of U.
    return torch.einsum("nk,nk->k", u.to(moment.dtype), moment).double() / sigma.double()
