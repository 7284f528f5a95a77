"""Muon for the hidden matrices of a network; its tables and vectors are left to (Coupled) Adam.

Jordan et al., 2024 (https://kellerjordan.github.io/posts/muon/), give a step the same size in every
direction of a matrix. With a momentum m of the gradients g of a matrix W of A rows and B columns,

    m <- mu m + (1 - mu) g,    O = NS(mu m + (1 - mu) g),    W <- (1 - lr lambda) W - lr c O,

where five steps of Newton and Schulz' iteration bring all singular values of O near 1. With
c = .2 sqrt(max(A, B)) (``match_rms_adamw``, https://arxiv.org/abs/2502.16982) a step is as large as
one of Adam, so a rate that was tuned for Adam is kept; c = sqrt(max(1, A / B)) is ``original``. The
steps are those of torch's own ``torch.optim.Muon``, which torch has from version 2.9 on.

A row of a table has a gradient only where its word occurs: a step of equal size in all directions
is none that a table should take, nor an output layer, which is one.

Flags: ``--muon-momentum`` 0.95, ``--muon-adjust-lr`` match_rms_adamw, ``--muon-tables`` adam,
    ``--adam-betas`` (0.9, 0.999), ``--adam-eps`` 1e-08, ``--weight-decay`` 0.
In order: ``hidden_matrices_by_name``, ``Muon.take``, ``lm/coupled_adam.py: CoupledAdam.step``.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Tuple

import torch
from torch import Tensor, nn

from spectral_fairseq.embeddings.table import Table
from spectral_fairseq.errors import (
    NEW_STATE,
    CheckpointError,
    ConfigurationError,
    check_choice,
    check_range,
)
from spectral_fairseq.lm.coupled_adam import CoupledAdam

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


class Muon(CoupledAdam):
    """Muon for some matrices, and Adam for all other parameters, in one optimiser.

    Matrices of 16 bits are updated in float32 and rounded; the momentum is float32.

    Args:
        params: parameters or groups of them, as for every optimiser of torch.
        matrices: those among them that Muon steps, such as
            :func:`~spectral_fairseq.training.tables.hidden_matrices` finds; :meth:`take` adds
            others.
        tables: those whose second moments are coupled, as of :class:`CoupledAdam`.
        lr: learning rate.
        betas: of Adam.
        eps: of Adam.
        weight_decay: fraction of a weight that is subtracted in a step, times the learning rate.
        momentum: mu, in [0, 1).
        adjust_lr_fn: ``match_rms_adamw`` or ``original``.

    Raises:
        ConfigurationError: this torch has no Muon; an option outside its range; a matrix that is
            none, that is a table too, or that is not among the parameters.
    """

    def __init__(
        self,
        params: Any,
        matrices: Iterable[Tensor] = (),
        tables: Iterable[Tensor] = (),
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        check_range("`momentum`", momentum, at_least=0, below=1)
        check_choice("`adjust_lr_fn`", adjust_lr_fn, ADJUSTMENTS)
        self._momentum, self._adjust_lr_fn = momentum, adjust_lr_fn
        self._matrices: List[Tensor] = []
        self._inner = _torch_muon(momentum, adjust_lr_fn)
        super().__init__(params, tables, lr, betas, eps, weight_decay)
        self.take(matrices)

    def __getstate__(self) -> Dict[str, Any]:
        return {
            **super().__getstate__(),
            "_matrices": self._matrices,
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
            ConfigurationError: one that is no matrix, is a table, or is not among the parameters.
        """
        for matrix in matrices:
            self._check_matrix("matrices", matrix, self._tables)
            if not any(matrix is other for other in self._matrices):
                self._matrices.append(matrix)

    def _update(self, parameter: Tensor, group: Any) -> None:
        taken = any(parameter is matrix for matrix in self._matrices)
        state = self.state[parameter]
        if state and taken != ("momentum_buffer" in state):
            raise CheckpointError(
                "a state in which the same parameters are stepped by Muon as now",
                f"the state of {'Adam' if taken else 'Muon'} for one of shape "
                f"{tuple(parameter.shape)}, which {'Muon' if taken else 'Adam'} is to step",
                NEW_STATE,
            )
        if not taken:
            super()._update(parameter, group)
            return
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        weight = parameter if parameter.dtype == dtype else parameter.detach().to(dtype)
        if weight is not parameter:
            weight.grad = parameter.grad.to(dtype)  # type: ignore[union-attr]
        inner = self._inner
        options = {name: group[name] for name in ("lr", "weight_decay")}
        inner.param_groups = [{**inner.defaults, **options, "params": [weight]}]
        inner.state.clear()
        inner.state[weight] = state
        inner.step()
        inner.state.clear()
        if weight is not parameter:
            parameter.copy_(weight)


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
            "Install a newer torch, or use Adam or CoupledAdam (fairseq: --optimizer adam).",
        )
    placeholder = nn.Parameter(torch.zeros(1, 1))
    return optimizer_class([placeholder], momentum=momentum, adjust_lr_fn=adjust_lr_fn)
