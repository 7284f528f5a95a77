r"""Adam with one second moment for all rows of an embedding table.

Stollenwerk and Stollenwerk: "Better Embeddings with Coupled Adam", ACL 2025,
https://arxiv.org/abs/2502.08441. Adam divides the step of a word's vector by the root of that
word's second moment, which is small for rare words: their common direction grows. For the rows
w_1 .. w_N of a table the paper therefore replaces the second moments by their mean over the rows,

    m_i = b1 m_i + (1 - b1) g_i,   v_i = b2 v_i + (1 - b2) g_i^2,   v = (1/N) \sum_i v_i
    w_i = w_i - lr (m_i / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps),

and leaves every other parameter to Adam. A mean of moving averages is the moving average of the
means, so v of shape (1, d) is all that is stored: a third less than Adam's table and two moments.
As in fairseq's Adam, eps is added to the root before its bias is corrected, and weight decay is
decoupled from the gradient (AdamW).

Flags: ``--adam-betas`` (0.9, 0.999), ``--adam-eps`` 1e-08, ``--weight-decay`` 0.
In order: ``plugin/optimizers.py``, ``CoupledAdam.couple``, ``CoupledAdam.step``.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import (
    NEW_STATE,
    CheckpointError,
    ConfigurationError,
    UnsupportedError,
    check_range,
)
from spectral_fairseq.lm.averaged_sgd import WideStateOptimizer


class CoupledAdam(WideStateOptimizer):
    """Adam that couples the second moments of the rows of some matrices.

    Parameters of 16 bits are updated in float32 and rounded; moments are float32, or the
    parameter's own dtype where that is wider.

    Args:
        params: parameters or groups of them, as for every optimiser of torch.
        tables: matrices among them, of shape (N, d), that are coupled; :meth:`couple` adds others.
        lr: learning rate.
        betas: b1 and b2.
        eps: added to the root of the second moment.
        weight_decay: fraction of a weight that is subtracted in a step, times the learning rate.

    Raises:
        ConfigurationError: an option outside its range; a table that is no matrix, or is not among
            the parameters.
    """

    supports_flat_params = False  # which have no rows
    saved_entry, saved_kind = "betas", "an Adam with or without coupled moments"

    def __init__(
        self,
        params: Any,
        tables: Iterable[Tensor] = (),
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            check_range(f"`{name}`", value, at_least=0)
        for beta in betas:
            check_range("each of `betas`", beta, at_least=0, below=1)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._tables: List[Tensor] = []
        self.couple(tables)

    def __getstate__(self) -> Dict[str, Any]:
        # What torch copies and pickles is its own attributes alone.
        return {**super().__getstate__(), "_tables": self._tables}

    def couple(self, tables: Iterable[Tensor]) -> None:
        """Couple the rows of further matrices, before the first step.

        Args:
            tables: parameters of this optimiser, of shape (N, d).

        Raises:
            ConfigurationError: a table that is no matrix, or is not among the parameters.
            CheckpointError: a table whose second moments were kept for each entry before.
        """
        for table in tables:
            self._check_matrix("tables", table)
            moment = self.state.get(table, {}).get("exp_avg_sq")
            if moment is not None and moment.size(0) != 1:
                raise _other_moments(table[:1].shape, moment.shape)
            if not any(table is other for other in self._tables):
                self._tables.append(table)

    def _check_matrix(self, name: str, matrix: Tensor, apart: Iterable[Tensor] = ()) -> None:
        """Refuse what is no matrix among the parameters, or is one of those that stand apart."""
        held = (parameter for group in self.param_groups for parameter in group["params"])
        known = any(matrix is parameter for parameter in held)
        taken = any(matrix is parameter for parameter in apart)
        if matrix.dim() != 2 or not known or taken:
            raise ConfigurationError(
                f"each of `{name}` to be a matrix among `params`, and of one kind",
                f"a tensor of shape {tuple(matrix.shape)}, "
                + ("a table" if taken else "one" if known else "not one")
                + " of them",
                "Pass the parameters themselves, not copies or views of them.",
            )

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Optional[Callable[[], Any]] = None
    ) -> Any:
        """Take one step; parameters without a gradient keep their values.

        Raises:
            CheckpointError: moments were loaded that were coupled and now are not, or the reverse.
            UnsupportedError: a sparse gradient.
        """
        result = self._evaluated(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.layout is not torch.strided:
                    found = f"a sparse one of shape {tuple(parameter.shape)}"
                    remedy = "Make the nn.Embedding without sparse=True."
                    raise UnsupportedError("gradients of whole tables", found, remedy)
                self._update(parameter, group)
        return result

    def _update(self, parameter: Tensor, group: Any) -> None:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        weight = parameter.to(dtype)
        gradient = parameter.grad.to(dtype)  # type: ignore[union-attr]
        coupled = any(parameter is table for table in self._tables)
        state = self.state[parameter]
        moments = weight[:1] if coupled else weight
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(moments)
        if state["exp_avg_sq"].shape != moments.shape:
            raise _other_moments(moments.shape, state["exp_avg_sq"].shape)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        if coupled:
            mean = gradient.square().mean(0, keepdim=True)  # [1, d]
            second.mul_(beta2).add_(mean, alpha=1 - beta2)
        else:
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        corrections = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        step_size = group["lr"] * math.sqrt(corrections[1]) / corrections[0]
        if group["weight_decay"]:
            weight.add_(weight, alpha=-group["weight_decay"] * group["lr"])
        weight.addcdiv_(first, second.sqrt().add_(group["eps"]), value=-step_size)
        if weight is not parameter:
            parameter.copy_(weight)


def _other_moments(expected: torch.Size, found: torch.Size) -> CheckpointError:
    return CheckpointError(
        f"second moments of shape {tuple(expected)}: one for all rows of a coupled table, one for "
        "each entry elsewhere",
        f"loaded ones of shape {tuple(found)}",
        f"Couple the tables that were coupled before. {NEW_STATE}",
    )
