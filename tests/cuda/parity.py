"""How far losses and gradients on a device are from those of the CPU in float32."""

from __future__ import annotations

import copy
from typing import List, NamedTuple, Tuple

import torch

from tests.cuda.matrix import MODELS, PRECISIONS, Training, criterion_for
from tests.plugin.conftest import parameters_in_use

# Of losses; gradients may be off by twice as much.
BOUNDS = {"fp32": 2e-4, "fp16": 2e-2, "bf16": 8e-2, "amp": 2e-2}
# fairseq's loss scaling, without which gradients in float16 vanish.
SCALES = {"fp16": 64.0, "amp": 64.0}


class Parity(NamedTuple):
    """Relative distances from the CPU.

    Attributes:
        loss: the largest of the losses of two steps and a validation.
        gradient: of all gradients together. One activation that rounding turns shows in a single
            parameter, and some gradients are zero but for rounding.
        worst: the parameter whose gradient is farthest off.
    """

    loss: float
    gradient: float
    worst: str


def compare(model: str, criterion: str, precision: str, device: str) -> Parity:
    """Train two steps on both devices from the same weights, rounded alike, and validate."""
    made = MODELS[model]
    dtype = PRECISIONS[precision]
    reference = made.make().to(dtype).float()
    moved = copy.deepcopy(reference)
    expected, wanted = _trained(reference, criterion, made.data, "fp32", "cpu", 1.0)
    scale = SCALES.get(precision, 1.0)
    losses, gradients = _trained(moved, criterion, made.data, precision, device, scale)
    loss = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(losses, expected))
    differences = [float((a - b).norm()) for a, b in zip(gradients, wanted)]
    whole = float(torch.stack([one.norm() for one in wanted]).norm())
    names = list(parameters_in_use(reference))
    return Parity(
        loss,
        float(torch.tensor(differences).norm()) / max(whole, 1e-12),
        names[max(range(len(names)), key=differences.__getitem__)],
    )


def _trained(
    model: torch.nn.Module, criterion: str, data: str, precision: str, device: str, scale: float
) -> Tuple[List[float], List[torch.Tensor]]:
    """Losses of two steps and a validation, and the gradients of the second step."""
    training = Training(model, criterion_for(criterion, model), data, precision, device)
    losses = [training.step(scale) for _ in range(2)]  # a stream's second segment has a state
    used = parameters_in_use(model).values()
    gradients = [parameter.grad.detach().cpu().double() / scale for parameter in used]
    losses.append(training.evaluate())
    return [float(loss) for loss in losses], gradients
