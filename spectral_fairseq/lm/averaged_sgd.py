r"""Stochastic gradient descent that can start to average its iterates at any step.

Polyak and Juditsky, SIAM J. Control Optim. 30 (1992), https://doi.org/10.1137/0330046, as used by
Merity, Keskar, Socher: "Regularizing and Optimizing LSTM Language Models", ICLR 2018,
https://openreview.net/forum?id=SyyGPP0TZ, section 3. With w_T the weights at the step T where
averaging starts,

    w_{t+1} = w_t - lr_t (g_t + weight_decay w_t)
    a_t     = 1/(t-T) \sum_{i=T+1}^{t} w_i                          (0 < t - T)

Training continues from w, and a is evaluated. This is :class:`torch.optim.ASGD` with t0 = 0 and
lambd = 0, except for two points in which its code deviates from its definition: it leaves the first
iterate w_{T+1} out of the average, and it applies the learning rate of the previous step, which
matters where the rate changes with the length of every segment.

Flags: ``--weight-decay`` 0, ``--nt-asgd-from-start`` off, ``--nt-asgd-interval`` 5,
    ``--nt-asgd-stop`` off, ``--warmup-updates`` 0.
In order: ``lm/non_monotonic.py: NonMonotonicTrigger.check``, ``AveragedSGD.start_averaging``,
    ``AveragedSGD.step``.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, Iterator, Optional

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError, check_range
from spectral_fairseq.functional.precision import at_least_float32
from spectral_fairseq.lm.wide_state import WideStateOptimizer

AVERAGE = "average"  # a, the average of the iterates since averaging started
ITERATE = "iterate"  # w, stored here while the parameter holds the average


class AveragedSGD(WideStateOptimizer):
    """SGD without momentum that can also keep the running average of its iterates.

    A parameter without a gradient in a step keeps its value, which enters the average like every
    other iterate. Parameters of 16 bits are updated in float32 and rounded; averages are float32,
    or the parameter's own dtype where that is wider. Values change in place: ``parameter.data``
    keeps its storage. Buffers of a model are not averaged.

    :meth:`state_dict` holds everything that is needed to resume. While the parameters hold the
    averages (:meth:`use_averages`) it also holds the iterates, so that a model and its optimiser
    can be saved at that time.

    Args:
        params: parameters or groups of them, as for every optimiser of torch.
        lr: learning rate, for each group.
        weight_decay: L2 weight decay, added to the gradient; for each group.

    Raises:
        ConfigurationError: a negative learning rate or weight decay.
    """

    supports_flat_params = True
    saved_entry, saved_kind = "averaged", "SGD with averaged iterates"

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        check_range("`lr`", lr, at_least=0)
        check_range("`weight_decay`", weight_decay, at_least=0)
        defaults = {"lr": lr, "weight_decay": weight_decay, "averaging": False, "averaged": 0}
        super().__init__(params, defaults)

    def _parameters(self) -> Iterator[Tensor]:
        return itertools.chain.from_iterable(group["params"] for group in self.param_groups)

    @property
    def averaging(self) -> bool:
        """Whether the iterates of all further steps enter the average."""
        return bool(self.param_groups[0]["averaging"])

    @property
    def averaged(self) -> int:
        """The number of iterates in the average."""
        return int(self.param_groups[0]["averaged"])

    @property
    def averages_in_use(self) -> bool:
        """Whether the parameters currently hold their averages."""
        return any(ITERATE in state for state in self.state.values())

    def start_averaging(self) -> None:
        """Average the iterates from the next step on; no effect if averaging has started."""
        for group in self.param_groups:
            group["averaging"] = True

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Optional[Callable[[], Any]] = None
    ) -> Any:
        """Take one step of SGD and, if averaging has started, add the new iterate to the average.

        Raises:
            ConfigurationError: the parameters hold their averages, and the gradients belong to
                those.
        """
        if self.averages_in_use:
            raise ConfigurationError(
                "the iterates in the parameters when a step is taken",
                "their averages",
                "Call use_iterates() before the forward pass.",
            )
        result = self._evaluated(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _descend(parameter, group["lr"], group["weight_decay"])
            if group["averaging"]:
                group["averaged"] += 1
                for parameter in group["params"]:
                    self._add_to_average(parameter, group["averaged"])
        return result

    def _add_to_average(self, parameter: Tensor, count: int) -> None:
        state = self.state[parameter]
        dtype = at_least_float32(parameter.dtype)
        if AVERAGE not in state:
            state[AVERAGE] = parameter.to(dtype, copy=True)
        else:
            state[AVERAGE].lerp_(parameter.to(dtype), 1.0 / count)

    @torch.no_grad()
    def use_averages(self) -> bool:
        """Copy the averages into the parameters and store the iterates.

        Returns:
            Whether any parameter changed. It is False before the first averaged step, when the
            average is the weights themselves, and if the averages are in use already.
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
        """Undo :meth:`use_averages` exactly, and return whether any parameter changed."""
        changed = False
        for parameter in self._parameters():
            if ITERATE in self.state.get(parameter, {}):
                parameter.copy_(self.state[parameter].pop(ITERATE))
                changed = True
        return changed


def _descend(parameter: Tensor, lr: float, weight_decay: float) -> None:
    """Take one step of SGD on one parameter, computed in float32 or wider."""
    weight = parameter.to(at_least_float32(parameter.dtype))
    gradient = parameter.grad.to(weight.dtype)  # type: ignore[union-attr]
    if weight_decay:
        if gradient.is_sparse:  # torch adds it to a dense one alone
            gradient = (weight * weight_decay).add_(gradient)
        else:
            gradient = gradient.add(weight, alpha=weight_decay)
    weight.add_(gradient, alpha=-lr)
    if weight is not parameter:
        parameter.copy_(weight)
