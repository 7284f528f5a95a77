"""A training in half precision is saved as it is trained, in float32.

``--fp16`` and ``--bf16`` step float32 copies of the weights. fairseq saves the model's own, which
are rounded to 11 or 8 bits, as float32 numbers, and makes new copies of these when it resumes.
The copies take no more room in the file, a resumed training goes on with the weights that it had,
and what reads the file in float32 (translation, averaging, analysis) has them unrounded.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, Tuple

import torch
from torch import Tensor

from spectral_fairseq.compat.patching import Patch, replaces, wrapping

Held = Tuple[Tensor, int]


def float32_copies(optimizer: Any) -> Dict[int, Held]:
    """What fairseq's optimiser steps instead of the parameters of half precision.

    Args:
        optimizer: as the trainer holds it.

    Returns:
        For the id of each parameter the float32 tensor that holds its copy, and where in it the
        copy begins: 0 in one of its own, but on a GPU ``--fp16`` flattens all of a device into one.
        Empty where the parameters themselves are stepped.
    """
    copies = getattr(optimizer, "fp32_params", None)
    if copies is None:
        return {}
    if not isinstance(copies, dict):  # --fp16-no-flatten-grads, --bf16
        return {id(half): (copy, 0) for half, copy in zip(optimizer.fp16_params, copies)}
    held: Dict[int, Held] = {}
    ends = dict.fromkeys(copies, 0)
    for half in optimizer.fp16_params:
        device = half.device.index
        if device in copies:
            held[id(half)] = (copies[device], ends[device])
            ends[device] += half.numel()
    return held


def view_for(held: Held, parameter: Tensor) -> Tensor:
    """The place of a parameter in what the optimiser holds, without a gradient."""
    tensor, start = held
    if tensor.shape == parameter.shape:
        return tensor.detach()
    return tensor.detach().view(-1)[start : start + parameter.numel()].view_as(parameter)


def _named_copies(trainer: Any) -> Iterator[Tuple[str, Tensor, Tensor]]:
    """Names in a checkpoint, parameters and float32 copies of a trainer's model."""
    held = float32_copies(trainer.optimizer)
    if held:
        for name, parameter in trainer.get_model().state_dict(keep_vars=True).items():
            if id(parameter) in held:
                yield name, parameter.detach(), view_for(held[id(parameter)], parameter)


def _is_rounding_of(weight: Any, half: Tensor) -> bool:
    """Whether ``half`` is ``weight`` in another precision, and not a weight that was changed."""
    return (
        isinstance(weight, Tensor)
        and weight.shape == half.shape
        and torch.equal(weight.to(half.device, half.dtype), half)
    )


@wrapping
def saving_float32(self: Any, *, original: Callable[..., Dict[str, Any]]) -> Dict[str, Any]:
    """Wrap ``Trainer.state_dict`` so that the model's weights are those that are trained."""
    state = original(self)
    for name, half, copy in _named_copies(self):
        if _is_rounding_of(state["model"].get(name), half) and _is_rounding_of(copy, half):
            state["model"][name] = copy
    return state


@wrapping
def restoring_float32(self: Any, *args: Any, original: Callable[..., Any], **kwargs: Any) -> Any:
    """Wrap ``Trainer.load_checkpoint`` so that the copies are the file's weights, unrounded.

    Also where the optimiser begins anew: with --finetune-from-model and --reset-optimizer.
    """
    common = self.cfg.common
    memory_efficient = common.memory_efficient_fp16 or common.memory_efficient_bf16
    if memory_efficient or not (common.fp16 or common.bf16):
        # There are no copies, and fairseq frees the loaded weights before it makes the optimiser.
        return original(self, *args, **kwargs)
    model = self.get_model()
    loaded: Dict[str, Any] = {}

    def remember(module: Any, state: Dict[str, Any], *_: Any) -> None:
        # The copy that --store-ema makes and loads meanwhile has this hook, too, and keeps it.
        if module is model:
            loaded.update(state)

    hook = model._register_load_state_dict_pre_hook(remember, with_module=True)
    try:
        extra_state = original(self, *args, **kwargs)
    finally:
        hook.remove()
    if loaded:
        for name, half, copy in _named_copies(self):
            if _is_rounding_of(loaded.get(name), half):
                copy.copy_(loaded[name])
        loaded.clear()
    return extra_state


FLOAT32_WEIGHTS = Patch(
    name="float32 weights",
    reason="With --fp16 and --bf16 a checkpoint holds rounded weights instead of the float32 ones "
    "that are trained, so that a resumed training differs from an uninterrupted one.",
    install=replaces(
        {
            "fairseq.trainer:Trainer.state_dict": saving_float32,
            "fairseq.trainer:Trainer.load_checkpoint": restoring_float32,
        }
    ),
)
