"""Constants of a criterion on the devices of its models."""

from __future__ import annotations

from typing import Dict

import torch
from torch import Tensor


class PerDevice:
    """A constant tensor, which is copied to a device only once: each copy keeps a GPU waiting.

    Args:
        constant: on any device.
    """

    def __init__(self, constant: Tensor) -> None:
        self._copies: Dict[torch.device, Tensor] = {constant.device: constant}

    def on(self, device: torch.device) -> Tensor:
        """The constant on ``device``."""
        if device not in self._copies:
            self._copies[device] = next(iter(self._copies.values())).to(device)
        return self._copies[device]
