"""Several workers on machines that have one GPU each, or none.

fairseq numbers its workers by the GPUs of a machine. Where there is no GPU, torchrun fails with a
division by zero, SLURM with an error of CUDA, and ``--distributed-init-method`` without
``--distributed-no-spawn`` ends with status 0 before anything was trained. A machine without GPUs
counts as one device here.

Newer versions than fairseq 0.12.2 also take one device for one worker, whatever torchrun says: each
process then trains alone, and all of them write the same checkpoints.
"""

from __future__ import annotations

import functools
import os
import types
from typing import Any, Callable

from spectral_fairseq.compat.patching import Overlay, Patch, replaces


def with_one_device(torch_module: types.ModuleType) -> Overlay:
    """An overlay of torch in which a machine without GPUs has one device.

    Args:
        torch_module: torch.

    Returns:
        What ``fairseq.distributed.utils`` sees as ``torch``; see Note [A module of their own].
    """
    cuda = torch_module.cuda

    # Asked at the time of the call, because asking starts CUDA, which would break later forks.
    def device_count() -> int:
        return max(1, cuda.device_count())

    def set_device(device: Any) -> None:
        if cuda.device_count():
            cuda.set_device(device)

    return Overlay(
        torch_module, cuda=Overlay(cuda, device_count=device_count, set_device=set_device)
    )


def as_many_as_torchrun_says(infer_init_method: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``infer_init_method`` so that all workers of torchrun train together.

    Args:
        infer_init_method: fairseq's function.

    Returns:
        A function of the same signature.
    """

    @functools.wraps(infer_init_method)
    def infer(cfg: Any, *args: Any, **kwargs: Any) -> None:
        if cfg.distributed_init_method is None and "TORCHELASTIC_RUN_ID" in os.environ:
            cfg.distributed_world_size = int(os.environ["WORLD_SIZE"])
        infer_init_method(cfg, *args, **kwargs)

    return infer


PATCH = Patch(
    name="workers without GPUs",
    reason="Without GPUs, torchrun and SLURM fail, or train nothing with status 0; with one GPU "
    "per machine, the workers of torchrun train apart and overwrite each other's checkpoints.",
    install=replaces(
        {
            "fairseq.distributed.utils:torch": with_one_device,
            "fairseq.distributed.utils:infer_init_method": as_many_as_torchrun_says,
        }
    ),
)
