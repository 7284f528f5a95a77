"""Several workers on machines that have one GPU each, or none.

fairseq numbers its workers by the GPUs of a machine. Where there is no GPU, torchrun fails with a
division by zero, SLURM with an error of CUDA, and ``--distributed-init-method`` without
``--distributed-no-spawn`` ends with status 0 before anything was trained. A machine without GPUs
counts as one device here.

Newer versions than fairseq 0.12.2 also take one device for one worker, whatever torchrun says:
each process then trains alone, and all of them write the same checkpoints. ``fairseq-hydra-train``
has numbered its workers before it loads the plugin (Note [When fairseq is patched]): there its
trainer refuses such a process, and nothing else of this numbering is mended.
"""

from __future__ import annotations

import os
import types
from typing import Any, Callable, Type

from spectral_fairseq.compat.patching import Overlay, Patch, replaces, wrapping
from spectral_fairseq.errors import ConfigurationError


def with_one_device(torch_module: types.ModuleType) -> Overlay:
    """An overlay of torch in which a machine without GPUs has one device."""
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


@wrapping
def as_many_as_torchrun_says(
    cfg: Any, *args: Any, original: Callable[..., None], **kwargs: Any
) -> None:
    """Wrap ``infer_init_method`` so that all workers of torchrun train together."""
    if cfg.distributed_init_method is None and "TORCHELASTIC_RUN_ID" in os.environ:
        cfg.distributed_world_size = int(os.environ["WORLD_SIZE"])
    original(cfg, *args, **kwargs)


@wrapping
def refusing_to_train_alone(
    self: Any, cfg: Any, *args: Any, original: Callable[..., None], **kwargs: Any
) -> None:
    """Wrap ``Trainer.__init__``: one worker of several that torchrun has started is no training.

    Raises:
        ConfigurationError: the settings of such a worker know of no other.
    """
    workers = int(os.environ.get("WORLD_SIZE", 1)) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    distributed = getattr(cfg, "distributed_training", cfg)  # an older script has a Namespace
    if workers > 1 and distributed.distributed_world_size == 1:
        settings = {"world_size": workers, "init_method": "env://", "no_spawn": "true", "rank": -1}
        together = (f"distributed_training.distributed_{key}={settings[key]}" for key in settings)
        raise ConfigurationError(
            f"one training by the {workers} workers of torchrun",
            "distributed_world_size 1, with which each trains alone and overwrites the checkpoints "
            "of the others",
            f"Add {' '.join(together)} to the command, and without GPUs "
            "distributed_training.distributed_backend=gloo.",
        )
    original(self, cfg, *args, **kwargs)


def without_device_ids(data_parallel: Type[Any]) -> Type[Any]:
    """A subclass of torch's ``DistributedDataParallel`` that takes fairseq's device on a CPU.

    fairseq names device 0 for a model on a CPU too, which torch refuses.
    """

    class CpuDataParallel(data_parallel):  # type: ignore[misc]
        """torch's own, without the numbers of GPUs where the model is on none."""

        def __init__(self, module: Any, *args: Any, **kwargs: Any) -> None:
            if all(each.device.type == "cpu" for each in module.parameters()):
                kwargs.update(device_ids=None, output_device=None)
            super().__init__(module, *args, **kwargs)

    CpuDataParallel.__name__ = data_parallel.__name__
    CpuDataParallel.__qualname__ = data_parallel.__qualname__
    return CpuDataParallel


CPU_WORKERS = Patch(
    name="workers without GPUs",
    reason="Without GPUs, torchrun and SLURM fail, as does --ddp-backend pytorch_ddp, or train "
    "nothing with status 0; with one GPU per machine, the workers of torchrun train apart and "
    "overwrite each other's checkpoints.",
    install=replaces(
        {
            "fairseq.distributed.utils:torch": with_one_device,
            "fairseq.distributed.utils:infer_init_method": as_many_as_torchrun_says,
            "fairseq.trainer:Trainer.__init__": refusing_to_train_alone,
            "fairseq.models.distributed_fairseq_model:DistributedDataParallel": without_device_ids,
        }
    ),
)
