"""Patches of how a training goes on: a resumed one is the same as an uninterrupted one."""

from __future__ import annotations

import inspect
import sys
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.compat.patching import Patch, replaces, wrapping

# A resumed training goes on counting how long its validation has not improved.
#
# fairseq counts for ``--patience`` in attributes of ``should_stop_early`` and saves neither, so
# that after an interruption the first validation, however bad, is the best one so far.


_PATIENCE_KEY = "patience"
COUNTED = ("best", "num_runs")


def counters() -> Iterator[Any]:
    """The running ``should_stop_early``; ``python -m fairseq_cli.train`` has it in __main__."""
    for name in ("__main__", "fairseq_cli.train"):
        function = getattr(sys.modules.get(name), "should_stop_early", None)
        if function is not None:
            yield function


@wrapping
def saving_patience(
    self: Any, filename: str, extra_state: Any, *, original: Callable[..., Any]
) -> Any:
    """Wrap ``Trainer.save_checkpoint`` so that the counts are saved."""
    for counter in counters():
        if hasattr(counter, "best"):
            counts = {name: getattr(counter, name) for name in COUNTED}
            extra_state = {**extra_state, _PATIENCE_KEY: counts}
    return original(self, filename, extra_state)


@wrapping
def restoring_patience(
    self: Any,
    filename: str,
    reset_optimizer: bool = False,
    reset_lr_scheduler: bool = False,
    optimizer_overrides: Any = None,
    reset_meters: bool = False,
    *,
    original: Callable[..., Any],
) -> Any:
    """Wrap ``Trainer.load_checkpoint`` so that saved counts are restored.

    As for fairseq's best loss, ``--reset-optimizer`` and ``--reset-meters`` start anew.
    """
    extra_state = original(
        self, filename, reset_optimizer, reset_lr_scheduler, optimizer_overrides, reset_meters
    )
    if not (reset_optimizer or reset_meters):
        for name, value in ((extra_state or {}).get(_PATIENCE_KEY) or {}).items():
            for counter in counters():
                setattr(counter, name, value)
    return extra_state


PATIENCE = Patch(
    name="patience",
    reason="A resumed training forgets for how long validation has not improved, so --patience "
    "counts from the start.",
    install=replaces(
        {
            "fairseq.trainer:Trainer.save_checkpoint": saving_patience,
            "fairseq.trainer:Trainer.load_checkpoint": restoring_patience,
        }
    ),
)


# A run that is resumed with another number of workers goes on at the same place in the data.
#
# fairseq saves how many batches each worker has taken in the epoch. With fewer workers the rest of
# the epoch would start too early, on batches that were trained on already; with more it would start
# too late, or fail with 'dataloader mismatch'. Every worker takes each n-th batch of one list, so
# that k batches of n workers are the first k * n of the list.


_DATA_POSITION_KEY = "num_shards"


@wrapping
def saving_data_position(self: Any, *, original: Callable[..., Dict[str, Any]]) -> Dict[str, Any]:
    """Wrap ``EpochBatchIterator.state_dict`` so that the number of workers is saved."""
    return {**original(self), _DATA_POSITION_KEY: self.num_shards}


@wrapping
def restoring_data_position(
    self: Any, state: Dict[str, Any], *, original: Callable[..., None]
) -> None:
    """Wrap ``EpochBatchIterator.load_state_dict`` so that it counts in batches of this run.

    Where the number does not divide, some batches are taken twice rather than left out.
    """
    workers = state.get(_DATA_POSITION_KEY) or self.num_shards
    taken = (state.get("iterations_in_epoch") or 0) * workers
    original(self, {**state, "iterations_in_epoch": taken // self.num_shards})


DATA_POSITION = Patch(
    name="position in the data",
    reason="A run that is resumed within an epoch with another number of workers repeats batches, "
    "leaves some out, or fails with 'dataloader mismatch'.",
    install=replaces(
        {
            "fairseq.data.iterators:EpochBatchIterator.state_dict": saving_data_position,
            "fairseq.data.iterators:EpochBatchIterator.load_state_dict": restoring_data_position,
        }
    ),
)


# A run that is resumed in a later epoch has the batches that it would have had.
#
# fairseq composes the batches of most tasks once, from an order of the sentences that it draws by
# the seed and the epoch in which it does so, and then only shuffles them from epoch to epoch. A
# resumed run composes them in the epoch in which it goes on: other sentences come together than in
# a run without interruption. fairseq 0.12.2 draws the order by the seed alone. With ``--update-
# ordered-indices-seed`` the trainer of any fairseq adds the epoch to the seed.


_BY_EPOCH = "_seed_follows_epoch"


@wrapping
def composing(self: Any, *args: Any, original: Callable[..., Any], **kwargs: Any) -> Any:
    """Wrap ``FairseqTask.get_batch_iterator``: batches for all epochs are those of the first."""
    call = inspect.signature(original).bind(self, *args, **kwargs)
    call.apply_defaults()
    values = call.arguments
    dataset, epoch = values["dataset"], values["epoch"]
    for_all_epochs = self.can_reuse_epoch_itr(dataset) and not (
        values.get("disable_iterator_cache") or values.get("update_epoch_batch_itr")
    )
    if epoch <= 1 or not for_all_epochs or dataset in self.dataset_to_epoch_iter:
        return original(self, *args, **kwargs)
    values["epoch"] = 1
    values["seed"] -= (epoch - 1) * getattr(self, _BY_EPOCH, False)
    iterator = original(*call.args, **call.kwargs)
    iterator.epoch = epoch
    dataset.set_epoch(epoch)
    return iterator


@wrapping
def telling(self: Any, *args: Any, original: Callable[..., Any], **kwargs: Any) -> Any:
    """Wrap ``Trainer.get_train_iterator``: the task knows whether the seed follows the epoch."""
    by_epoch = getattr(self.cfg.dataset, "update_ordered_indices_seed", False)
    setattr(self.task, _BY_EPOCH, bool(by_epoch))
    return original(self, *args, **kwargs)


BATCH_COMPOSITION = Patch(
    name="batch composition",
    reason="A run that is resumed in its second epoch or later sees other batches than an "
    "uninterrupted run.",
    install=replaces(
        {
            "fairseq.tasks.fairseq_task:FairseqTask.get_batch_iterator": composing,
            "fairseq.trainer:Trainer.get_train_iterator": telling,
        }
    ),
)


# A later training of the same process begins anew, as the trainings of a hydra grid do.
#
# fairseq keeps the best validation loss, and how often it was missed for ``--patience``, in
# attributes of two functions. A training that follows another in one process would go on with them:
# it would have no ``checkpoint_best.pt`` and end early.


@wrapping
def starting_anew(self: Any, *args: Any, original: Callable[..., None], **kwargs: Any) -> None:
    """Wrap ``Trainer.__init__``, which runs once a training, before any checkpoint is loaded."""
    from fairseq import checkpoint_utils

    for function in (checkpoint_utils.save_checkpoint, *counters()):
        for name in COUNTED:
            vars(function).pop(name, None)
    original(self, *args, **kwargs)


SEVERAL_TRAININGS = Patch(
    name="several trainings",
    reason="A training that follows another in one process, as in a grid of hydra, goes on with "
    "the other's best loss and patience.",
    install=replaces({"fairseq.trainer:Trainer.__init__": starting_anew}),
)


# ``--curriculum N`` shuffles from epoch N + 1 on.
#
# fairseq reuses the data loader of the first epoch, and with it whether its batches were shuffled.


def _unneeded_curriculum() -> Optional[str]:
    from fairseq.data.iterators import EpochBatchIterator

    reuses = "reuse_dataloader" in inspect.signature(EpochBatchIterator.__init__).parameters
    return None if reuses else "this fairseq makes a data loader for each epoch"


@wrapping
def shuffling(
    self: Any, epoch: int, shuffle: bool, *args: Any, original: Callable[..., Any], **kwargs: Any
) -> Any:
    """Wrap ``EpochBatchIterator._get_iterator_for_epoch``: each epoch has its own ``shuffle``."""
    if getattr(self, "dataloader", None) is not None:
        self.dataloader.batch_sampler.shuffle = shuffle
    return original(self, epoch, shuffle, *args, **kwargs)


CURRICULUM = Patch(
    name="curriculum",
    reason="--curriculum leaves the batches in their order for the whole training.",
    install=replaces(
        {"fairseq.data.iterators:EpochBatchIterator._get_iterator_for_epoch": shuffling}
    ),
    unneeded=_unneeded_curriculum,
)


# Validation on the training split, ``--valid-subset valid,train``, leaves training alone.
#
# fairseq keeps one iterator for each split. That of the training split is both trained and
# validated on, so that each validation uses up an epoch of training.


@wrapping
def apart(
    self: Any, subset: str, disable_iterator_cache: bool = False, *, original: Callable[..., Any]
) -> Any:
    """Wrap ``Trainer.get_valid_iterator``: the training split gets an iterator of its own."""
    trained_on = subset == self.cfg.dataset.train_subset
    return original(self, subset, disable_iterator_cache or trained_on)


VALIDATION_ON_TRAIN = Patch(
    name="validation on training data",
    reason="--valid-subset valid,train uses up epochs of training and still ends with status 0.",
    install=replaces({"fairseq.trainer:Trainer.get_valid_iterator": apart}),
)


# A training in half precision is saved as it is trained, in float32.
#
# ``--fp16`` and ``--bf16`` step float32 copies of the weights. fairseq saves the model's own, which
# are rounded to 11 or 8 bits, as float32 numbers, and makes new copies of these when it resumes.
# The copies take no more room in the file, a resumed training goes on with the weights that it had,
# and what reads the file in float32 (translation, averaging, analysis) has them unrounded.

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
def restoring_float32(
    self: Any,
    filename: str,
    reset_optimizer: bool = False,
    *args: Any,
    original: Callable[..., Any],
    **kwargs: Any,
) -> Any:
    """Wrap ``Trainer.load_checkpoint`` so that the copies are the file's weights, unrounded."""
    loaded: Dict[str, Any] = {}
    hook = self.get_model()._register_load_state_dict_pre_hook(
        lambda state, *_: loaded.update(state)
    )
    try:
        extra_state = original(self, filename, reset_optimizer, *args, **kwargs)
    finally:
        hook.remove()
    if loaded and not reset_optimizer:
        for name, half, copy in _named_copies(self):
            if _is_rounding_of(loaded.get(name), half):
                copy.copy_(loaded[name])
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
