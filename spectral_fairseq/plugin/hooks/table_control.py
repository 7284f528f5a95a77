"""Where the trainer carries out the control of tables outside the optimiser.

After every update that was taken, outside autograd, clipping and the optimiser, and on the weights
that the optimiser trains: the float32 copy where fairseq keeps one. The first worker plans the
change and the others receive it, since two eigensolvers need not agree on the last bit; all apply
the same products to equal tables. What else a checkpoint needs, the norms that an automatic prior
refers to, lies in its extra state.

Averaged SGD counts an iterate in when it is made, so an average holds the k-th ones as they were
before they were changed.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterator

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.models import FairseqMultiModel
from torch import Tensor, nn

from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.errors import UnsupportedError
from spectral_fairseq.functional.spectrum_decay import TableChange, apply_change_
from spectral_fairseq.plugin.criterions.penalised import PenalisedCrossEntropy
from spectral_fairseq.plugin.criterions.table_control import Controlled
from spectral_fairseq.plugin.criterions.table_prior import restore_start_norms, start_norms
from spectral_fairseq.plugin.hooks.extra_state import kept_in_checkpoints

EXTRA_STATE = "table_start_norms"


def trained_weights(optimizer: Any, parameter: Tensor) -> Tensor:
    """What fairseq's optimiser trains for a parameter: itself, or its float32 copy.

    Args:
        optimizer: as the trainer holds it.
        parameter: of the model.

    Returns:
        Shape of the parameter, without a gradient; writing to it changes what is trained.
    """
    copies = getattr(optimizer, "fp32_params", None)
    if copies is None:
        return parameter.detach()
    if not isinstance(copies, dict):  # --fp16-no-flatten-grads, --bf16
        (copy,) = (c for p, c in zip(optimizer.fp16_params, copies) if p is parameter)
        return copy.detach()
    offset = 0  # one flat tensor for each device
    for other in optimizer.fp16_params:
        if other is parameter:
            break
        if other.device == parameter.device:
            offset += other.numel()
    flat = copies[parameter.device.index].detach()
    return flat[offset : offset + parameter.numel()].view_as(parameter)


def check_configuration(trainer: Any) -> None:
    """Refuse ways of training in which no worker holds the whole table after an update.

    Raises:
        UnsupportedError: sharded parameters, or workers whose weights differ.
    """
    criterion = trainer.get_criterion()
    if not isinstance(criterion, PenalisedCrossEntropy):
        return
    criterion.suit(trainer.get_model())
    if not criterion.table_control.active:
        return
    distributed = trainer.cfg.distributed_training
    for asked, flag in (
        (trainer.cfg.optimization.use_bmuf, "--use-bmuf"),
        (
            distributed.ddp_backend in ("fully_sharded", "slowmo"),
            f"--ddp-backend {distributed.ddp_backend}",
        ),
        (trainer.cfg.common.model_parallel_size > 1, "--model-parallel-size"),
        (distributed.pipeline_model_parallel, "--pipeline-model-parallel"),
        (trainer.cfg.common.tpu, "--tpu"),
    ):
        if asked:
            raise UnsupportedError(
                "every worker to hold the whole table, for control outside the optimiser",
                flag,
                "Remove it; --ddp-backend legacy_ddp and pytorch_ddp work.",
            )


@torch.no_grad()
def control_tables(trainer: Any, lr: float) -> None:
    """Change the output tables if that is due after the trainer's latest update.

    Args:
        trainer: fairseq's.
        lr: learning rate of that update.

    Raises:
        DataError: a table with infinity or NaN in it; no table is written.
    """
    criterion = trainer.get_criterion()
    if not isinstance(criterion, PenalisedCrossEntropy):
        return
    control = criterion.table_control
    if not control.is_due(trainer.get_num_updates()):
        return
    highest = max(trainer.cfg.optimization.lr)
    lr_share = min(1.0, lr / highest) if highest > 0 else 0.0
    for one in _controlled(criterion, trainer.get_model()):
        weight = trained_weights(trainer.optimizer, one.parameter)
        plan = functools.partial(one.plan, weight, lr_share)
        apply_change_(weight, agreed_change(plan, weight, trainer), one.excluded)
        if weight.data_ptr() != one.parameter.data_ptr():
            one.parameter.copy_(weight)


def _controlled(criterion: Any, model: nn.Module) -> Iterator[Controlled]:
    """What is to be changed in a model, each matrix once."""
    seen = set()
    for one in model.models.values() if isinstance(model, FairseqMultiModel) else (model,):
        for found in criterion.table_control.controlled(criterion.penalties.view(one)):
            if found.parameter not in seen:
                seen.add(found.parameter)
                yield found


def agreed_change(plan: Callable[[], TableChange], weight: Tensor, trainer: Any) -> TableChange:
    """The first worker's plan, on every worker."""
    if trainer.data_parallel_world_size == 1:
        return plan()
    if trainer.data_parallel_rank == 0:
        packed = plan().packed()
    else:
        shape = (weight.size(1) + 2, weight.size(1))
        packed = weight.new_empty(shape, dtype=torch.promote_types(weight.dtype, torch.float32))
    distributed_utils.broadcast(packed, 0, trainer.data_parallel_process_group)
    return TableChange.unpacked(packed)


def _checking(begin_epoch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin_epoch)
    def check_and_begin_epoch(self: Any, epoch: int) -> Any:
        check_configuration(self)
        return begin_epoch(self, epoch)

    return check_and_begin_epoch


def _controlling(train_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train_step)
    def step_and_control(self: Any, *args: Any, **kwargs: Any) -> Any:
        # fairseq calls itself again where --amp overflowed; and an update may be left out.
        before, lr = self.get_num_updates(), self.get_lr()
        result = train_step(self, *args, **kwargs)
        if before < self.get_num_updates() != getattr(self, "_tables_controlled_at", None):
            self._tables_controlled_at = self.get_num_updates()
            control_tables(self, lr)
        return result

    return step_and_control


PATCH = Patch(
    name="table control",
    reason="--spectrum-decay, --table-centering and --orthogonality-decay change tables after an "
    "update.",
    install=replaces(
        {
            "fairseq.trainer:Trainer.begin_epoch": _checking,
            "fairseq.trainer:Trainer.train_step": _controlling,
            **kept_in_checkpoints(
                EXTRA_STATE,
                lambda trainer: start_norms(trainer.get_model()),
                lambda trainer, norms: restore_start_norms(trainer.get_model(), norms or {}),
            ),
        }
    ),
)
