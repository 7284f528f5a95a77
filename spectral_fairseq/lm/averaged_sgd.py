r"""Stochastic gradient descent that can start, at any step, to average its iterates.

Polyak and Juditsky, SIAM J. Control Optim. 30 (1992), as used by Merity, Keskar, Socher, ICLR 2018
(Regularizing and Optimizing LSTM Language Models, section 3). With w_T the weights at the step T
where averaging starts,

    w_{t+1} = w_t - lr_t (g_t + weight_decay w_t)
    a_t     = 1/(t-T) \sum_{i=T+1}^{t} w_i                          (0 < t - T)

Training goes on from w; a is what is evaluated. This is :class:`torch.optim.ASGD` with t0 = 0 and
lambd = 0, but for two things that its code does and its definition does not: it leaves the first
iterate w_{T+1} out of the average, and it applies the learning rate of the step before, which
matters where the rate changes with the length of every segment.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, Iterator, Optional

import torch
from torch import Tensor

from spectral_fairseq.errors import CheckpointError, ConfigurationError

AVERAGE = "average"  # a, of the iterates since averaging started
ITERATE = "iterate"  # w, kept here while the parameter holds the average


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class AveragedSGD(torch.optim.Optimizer):
    """SGD without momentum, and the running average of its iterates once that is asked for.

    A parameter without a gradient in a step keeps its value, which enters the average like every
    other iterate. Parameters of 16 bits are updated in float32 and rounded; averages are float32,
    or the parameter's own type where that is wider. Values change in place: ``parameter.data``
    stays the same storage. Buffers of a model are not averaged.

    Everything needed to go on is in :meth:`state_dict`, the iterates too while the parameters
    hold the averages (:meth:`use_averages`), so a model and its optimiser may be saved then.

    Args:
        params: parameters or groups of them, as for every optimiser of torch.
        lr: learning rate, per group.
        weight_decay: of the L2 kind, added to the gradient; per group.
    """

    # Read by the host's half-precision wrappers. The last one: the host puts the saved state back
    # as it was, on the CPU, after load_state_dict; ours arrives on its device in its own type.
    supports_flat_params = True
    supports_memory_efficient_fp16 = True
    disable_mem_eff_fp16_loading_hack = True

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        if lr < 0 or weight_decay < 0:
            raise ConfigurationError(
                "a learning rate and a weight decay of 0 or more",
                f"lr {lr} and weight decay {weight_decay}",
                "Correct --lr or --weight-decay.",
            )
        defaults = {"lr": lr, "weight_decay": weight_decay, "averaging": False, "averaged": 0}
        super().__init__(params, defaults)

    def _parameters(self) -> Iterator[Tensor]:
        return itertools.chain.from_iterable(group["params"] for group in self.param_groups)

    @property
    def averaging(self) -> bool:
        """Whether every further step enters the average."""
        return bool(self.param_groups[0]["averaging"])

    @property
    def averaged(self) -> int:
        """Number of iterates in the average."""
        return int(self.param_groups[0]["averaged"])

    @property
    def averages_in_use(self) -> bool:
        """Whether the parameters hold their averages at present."""
        return any(ITERATE in state for state in self.state.values())

    def start_averaging(self) -> None:
        """Average from the next step on; without effect where that is done already."""
        for group in self.param_groups:
            group["averaging"] = True

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Optional[Callable[[], Any]] = None
    ) -> Any:
        """Take one step of SGD and, once averaging, count the new iterate in.

        Args:
            closure: computes the loss anew and its gradients; seldom needed.

        Returns:
            What ``closure`` returned, or None without one.

        Raises:
            ConfigurationError: the parameters hold their averages, so the gradients are theirs.
        """
        if self.averages_in_use:
            raise ConfigurationError(
                "the iterates in the parameters when a step is taken",
                "their averages",
                "Call use_iterates() before the forward pass.",
            )
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _descend(parameter, group["lr"], group["weight_decay"])
            if group["averaging"]:
                group["averaged"] += 1
                for parameter in group["params"]:
                    self._count_in(parameter, group["averaged"])
        return result

    def _count_in(self, parameter: Tensor, count: int) -> None:
        state = self.state[parameter]
        dtype = _at_least_float32(parameter.dtype)
        if AVERAGE not in state:
            state[AVERAGE] = parameter.to(dtype, copy=True)
        else:
            state[AVERAGE].lerp_(parameter.to(dtype), 1.0 / count)

    @torch.no_grad()
    def use_averages(self) -> bool:
        """Put the averages into the parameters and keep the iterates aside.

        Returns:
            Whether any parameter changed: False before the first averaged step, when the only
            average there is are the weights themselves, and where it was done before.
        """
        if self.averages_in_use:
            return False
        changed = False
        for parameter in self._parameters():
            if AVERAGE in self.state.get(parameter, {}):
                state = self.state[parameter]
                state[ITERATE] = parameter.detach().clone()
                parameter.copy_(state[AVERAGE])
                changed = True
        return changed

    @torch.no_grad()
    def use_iterates(self) -> bool:
        """Undo :meth:`use_averages`, bit for bit.

        Returns:
            Whether any parameter changed.
        """
        changed = False
        for parameter in self._parameters():
            if ITERATE in self.state.get(parameter, {}):
                parameter.copy_(self.state[parameter].pop(ITERATE))
                changed = True
        return changed

    def load_state_dict(self, state_dict: Any) -> None:
        """Go on from a saved state; the parameters must be loaded to match, before.

        Args:
            state_dict: from :meth:`state_dict` of an optimiser of the same groups.

        Raises:
            CheckpointError: the state is that of another optimiser.
        """
        if any("averaged" not in group for group in state_dict["param_groups"]):
            raise CheckpointError(
                "the state of SGD with averaged iterates",
                "the state of another optimiser",
                "Add --reset-optimizer to start this one from the checkpoint's weights.",
            )
        super().load_state_dict(state_dict)
        # torch gave every tensor its parameter's type; averages keep their own.
        saved = itertools.chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        for key, parameter in zip(saved, self._parameters()):
            if AVERAGE in state_dict["state"].get(key, {}):
                self.state[parameter][AVERAGE] = state_dict["state"][key][AVERAGE].to(
                    device=parameter.device, dtype=_at_least_float32(parameter.dtype), copy=True
                )


def _descend(parameter: Tensor, lr: float, weight_decay: float) -> None:
    """One step of SGD on one parameter, computed in float32 at least."""
    weight = parameter.to(_at_least_float32(parameter.dtype))
    gradient = parameter.grad.to(weight.dtype)  # type: ignore[union-attr]
    if weight_decay:
        gradient = gradient.add(weight, alpha=weight_decay)
    weight.add_(gradient, alpha=-lr)
    if weight is not parameter:
        parameter.copy_(weight)
