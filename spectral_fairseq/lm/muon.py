"""Muon for the hidden matrices of a network; its tables and vectors are left to Adam.

Jordan et al., 2024 (https://kellerjordan.github.io/posts/muon/), give a step the same size in every
direction of a matrix. With a momentum m of the gradients g of a matrix W of A rows and B columns,

    m <- mu m + (1 - mu) g,    O = NS(mu m + (1 - mu) g),    W <- (1 - lr lambda) W - lr c O,

where five steps of Newton and Schulz' iteration bring all singular values of O near 1. With
c = .2 sqrt(max(A, B)) (``match_rms_adamw``, https://arxiv.org/abs/2502.16982) a step is as large as
one of Adam, so a rate that was tuned for Adam is kept; c = sqrt(max(1, A / B)) is ``original``. The
steps are those of torch's own ``torch.optim.Muon``, which torch has from version 2.9 on.

A row of a table has a gradient only where its word occurs. So a table, such as that of the output
layer, should not take a step of equal size in all directions. As in fairseq's Adam, eps is added to
the root of the second moment before its bias is corrected, and weight decay is decoupled from the
gradient (AdamW).

Flags: ``--muon-momentum`` 0.95, ``--muon-adjust-lr`` match_rms_adamw,
    ``--adam-betas`` (0.9, 0.999), ``--adam-eps`` 1e-08, ``--weight-decay`` 0.
In order: ``hidden_matrices_by_name``, ``Muon.take``, ``Muon.step``.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, Iterable, Optional, Set, Tuple

import torch
from torch import Tensor, nn

from spectral_fairseq.embeddings.table import Table
from spectral_fairseq.errors import (
    NEW_STATE,
    CheckpointError,
    ConfigurationError,
    UnsupportedError,
    check_choice,
    check_range,
)
from spectral_fairseq.functional.precision import at_least_float32
from spectral_fairseq.lm.wide_state import WideStateOptimizer

ADJUSTMENTS = ("match_rms_adamw", "original")


def hidden_matrices_by_name(
    model: nn.Module, tables: Iterable[Tensor] = ()
) -> Dict[str, nn.Parameter]:
    """The trained matrices of a network that are neither tables nor biases, each once.

    These are the parameters of two dimensions whose names have ``weight`` in their last part, such
    as those of ``Linear`` and of LSTMs. Convolutions and the stacked experts of some models have
    three dimensions, and are left to Adam.

    Args:
        model: the network.
        tables: further parameters to leave out, such as the weight of the output layer.

    Returns:
        name -> parameter, of shape (A, B) with A, B > 1.
    """
    left_out = {id(table) for table in tables}
    for module in model.modules():
        if isinstance(module, (Table, nn.Embedding, nn.EmbeddingBag)):
            left_out.update(id(parameter) for parameter in module.parameters(recurse=False))
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and parameter.dim() == 2
        and min(parameter.shape) > 1
        and "weight" in name.rpartition(".")[2]
        and id(parameter) not in left_out
    }


class Muon(WideStateOptimizer):
    """Muon for some matrices, and Adam for all other parameters, in one optimiser.

    Parameters of 16 bits are updated in float32 and rounded; momentum and moments are float32, or
    the parameter's own dtype where that is wider.

    Args:
        params: parameters or groups of them, as for every optimiser of torch.
        matrices: those among them that Muon steps, such as ``training.hidden_matrices`` finds;
            :meth:`take` adds others.
        lr: learning rate.
        betas: b1 and b2 of Adam.
        eps: added to the root of Adam's second moment.
        weight_decay: fraction of a weight that is subtracted in a step, times the learning rate.
        momentum: mu, in [0, 1).
        adjust_lr_fn: ``match_rms_adamw`` or ``original``.

    Raises:
        ConfigurationError: this torch has no Muon; an option outside its range; a matrix that is
            none, or that is not among the parameters.
    """

    supports_flat_params = False  # which are no matrices
    saved_entry, saved_kind = "betas", "Muon or Adam"

    def __init__(
        self,
        params: Any,
        matrices: Iterable[Tensor] = (),
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            check_range(f"`{name}`", value, at_least=0)
        for beta in betas:
            check_range("each of `betas`", beta, at_least=0, below=1)
        check_range("`momentum`", momentum, at_least=0, below=1)
        check_choice("`adjust_lr_fn`", adjust_lr_fn, ADJUSTMENTS)
        self._momentum, self._adjust_lr_fn = momentum, adjust_lr_fn
        # By place: sharding puts other parameters into the groups (accelerate's FSDP 2).
        self._places: Set[Tuple[int, int]] = set()
        self._inner = _torch_muon(momentum, adjust_lr_fn)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.take(matrices)

    def __getstate__(self) -> Dict[str, Any]:
        # What torch copies and pickles is its own attributes alone.
        return {
            **super().__getstate__(),
            "_places": self._places,
            "_momentum": self._momentum,
            "_adjust_lr_fn": self._adjust_lr_fn,
        }

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_inner" not in self.__dict__:
            self._inner = _torch_muon(self._momentum, self._adjust_lr_fn)

    def take(self, matrices: Iterable[Tensor]) -> None:
        """Step further matrices by Muon, before the first step.

        Args:
            matrices: parameters of this optimiser, of shape (A, B).

        Raises:
            ConfigurationError: one that is no matrix, or is not among the parameters.
        """
        places = {
            id(parameter): (at, index)
            for at, group in enumerate(self.param_groups)
            for index, parameter in enumerate(group["params"])
        }
        for matrix in matrices:
            place = places.get(id(matrix))
            if matrix.dim() != 2 or place is None:
                raise ConfigurationError(
                    "each of `matrices` to be a matrix among `params`",
                    f"a tensor of shape {tuple(matrix.shape)}, "
                    f"{'not one' if place is None else 'one'} of them",
                    "Pass the parameters themselves, not copies or views of them.",
                )
            self._places.add(place)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Optional[Callable[[], Any]] = None
    ) -> Any:
        """Take one step; parameters without a gradient keep their values.

        Raises:
            CheckpointError: the state of Adam was loaded for what Muon steps, or the reverse.
            UnsupportedError: a sparse gradient.
        """
        result = self._evaluated(closure)
        for at, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                if parameter.grad.layout is not torch.strided:
                    found = f"a sparse one of shape {tuple(parameter.shape)}"
                    remedy = "Make the nn.Embedding without sparse=True."
                    raise UnsupportedError("gradients of whole tables", found, remedy)
                self._update(parameter, group, (at, index) in self._places)
        return result

    def _update(self, parameter: Tensor, group: Any, taken: bool) -> None:
        state = self.state[parameter]
        if state and taken != ("momentum_buffer" in state):
            raise CheckpointError(
                "a state in which the same parameters are stepped by Muon as now",
                f"the state of {'Adam' if taken else 'Muon'} for one of shape "
                f"{tuple(parameter.shape)}, which {'Muon' if taken else 'Adam'} is to step",
                NEW_STATE,
            )
        dtype = at_least_float32(parameter.dtype)
        weight = parameter.detach().to(dtype)
        gradient = parameter.grad.to(dtype)  # type: ignore[union-attr]
        if taken:
            self._step_of_muon(weight, gradient, state, group)
        else:
            _step_of_adam(weight, gradient, state, group)
        if weight.dtype != parameter.dtype:
            parameter.copy_(weight)

    def _step_of_muon(
        self, weight: Tensor, gradient: Tensor, state: Dict[str, Any], group: Dict[str, Any]
    ) -> None:
        weight.grad = gradient
        inner = self._inner
        options = {name: group[name] for name in ("lr", "weight_decay")}
        inner.param_groups = [{**inner.defaults, **options, "params": [weight]}]
        inner.state.clear()
        inner.state[weight] = state
        inner.step()
        inner.state.clear()


def _step_of_adam(
    weight: Tensor, gradient: Tensor, state: Dict[str, Any], group: Dict[str, Any]
) -> None:
    if not state:
        state["step"] = 0
        state["exp_avg"] = torch.zeros_like(weight)
        state["exp_avg_sq"] = torch.zeros_like(weight)
    state["step"] += 1
    beta1, beta2 = group["betas"]
    first, second = state["exp_avg"], state["exp_avg_sq"]
    first.mul_(beta1).add_(gradient, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    corrections = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
    step_size = group["lr"] * math.sqrt(corrections[1]) / corrections[0]
    if group["weight_decay"]:
        weight.add_(weight, alpha=-group["weight_decay"] * group["lr"])
    weight.addcdiv_(first, second.sqrt().add_(group["eps"]), value=-step_size)


def _torch_muon(momentum: float, adjust_lr_fn: str) -> Any:
    """torch's own optimiser, which is told the matrix at each step.

    Raises:
        ConfigurationError: this torch has none.
    """
    optimizer_class: Any = getattr(torch.optim, "Muon", None)
    if optimizer_class is None:
        raise ConfigurationError(
            "a torch that has torch.optim.Muon: 2.9 or newer",
            "an older torch, which has none",
            "Install a newer torch, or use Adam (fairseq: --optimizer adam).",
        )
    placeholder = nn.Parameter(torch.zeros(1, 1))
    return optimizer_class([placeholder], momentum=momentum, adjust_lr_fn=adjust_lr_fn)
