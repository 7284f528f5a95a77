"""What fairseq's trainer has no hook for: progress and counts told to tables, and checks."""

from __future__ import annotations

import functools
import logging
from typing import Any, Callable, Mapping

import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from torch import Tensor, nn

from spectral_fairseq import refusals
from spectral_fairseq.checkpoints.rewriting import entries_by_module, factored_kind
from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.embeddings import (
    PlainEmbedding,
    SVDEmbedding,
    Table,
    WeightNormEmbedding,
)
from spectral_fairseq.embeddings.svd import V_SCALE
from spectral_fairseq.errors import (
    CheckpointError,
    SpectralFairseqError,
)
from spectral_fairseq.heads import Head, SoftmaxHead
from spectral_fairseq.plugin.counts import building_for
from spectral_fairseq.plugin.criterion import PenalisedCrossEntropy
from spectral_fairseq.plugin.models.awd_lstm import AWDLSTMLanguageModel
from spectral_fairseq.plugin.models.find import head_of
from spectral_fairseq.plugin.models.registry import warn_of_idle_options
from spectral_fairseq.plugin.models.transformer_xl import TransformerXLLanguageModel
from spectral_fairseq.plugin.trainer.state import kept_in_checkpoints

# Tables learn the epoch and criterions the number of updates; criterions check models before
# training.
#
# fairseq tells the epoch to tasks, datasets and schedulers but to no module, and the number of
# updates to no criterion. Both are restored when training resumes.


_CHECKED = "_spectral_fairseq_checked"


def _check(trainer: Any) -> None:
    model, criterion = trainer.get_model(), trainer.get_criterion()
    if isinstance(criterion, AdaptiveLoss) and isinstance(head_of(model), Head):
        raise refusals.ADAPTIVE_LOSS.error("--criterion adaptive_loss")
    warn_of_idle_options(model, trainer.cfg.model)
    if isinstance(criterion, PenalisedCrossEntropy):
        criterion.check_model(model)
        criterion.log_spectrum.check_metric(trainer.cfg.checkpoint.best_checkpoint_metric)
        for form in {str(one.form) for one in criterion.objectives_of(model)}:
            logger.info("the form of the loss is %s", form)
    elif isinstance(model, (AWDLSTMLanguageModel, TransformerXLLanguageModel)):
        model.warn_of_other_criterion(type(criterion).__name__)


def _telling_epoch(begin_epoch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin_epoch)
    def begin_epoch_and_tell(self: Any, epoch: int) -> Any:
        result = begin_epoch(self, epoch)
        # Here rather than in the first step, where fairseq would dump its state into crash.pt.
        if not getattr(self, _CHECKED, False):
            _check(self)
            setattr(self, _CHECKED, True)
        for module in self.get_model().modules():
            if isinstance(module, WeightNormEmbedding):
                module.set_epoch(epoch)
        return result

    return begin_epoch_and_tell


def _telling_updates(train_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train_step)
    def tell_and_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.get_criterion(), PenalisedCrossEntropy):
            self.get_criterion().num_updates = self.get_num_updates()
        return train_step(self, *args, **kwargs)

    return tell_and_step


TRAINING_PROGRESS = Patch(
    name="training progress",
    reason="Weight-norm tables and lazy penalties depend on the epoch or the number of updates, "
    "and criterions check the model before training.",
    install=replaces(
        {
            "fairseq.trainer:Trainer.begin_epoch": _telling_epoch,
            "fairseq.trainer:Trainer.train_step": _telling_updates,
        }
    ),
)


# Refuse ways of training that would run, and would train something else or nothing.


def check_ways(trainer: Any) -> None:
    """Refuse them before the first update.

    Args:
        trainer: fairseq's.

    Raises:
        UnsupportedError: sharded tables, or tables that half precision keeps from moving.
    """
    modules = list(trainer.get_model().modules())
    if isinstance(trainer.get_criterion(), PenalisedCrossEntropy) or any(map(_is_own, modules)):
        refusals.SHARDED.check(trainer.cfg)
    if any(isinstance(module, (SVDEmbedding, WeightNormEmbedding)) for module in modules):
        refusals.ROUNDED.check(trainer.cfg)


def _is_own(module: nn.Module) -> bool:
    plain = isinstance(module, (PlainEmbedding, SoftmaxHead))
    return isinstance(module, (Table, Head)) and not plain


def _checking_the_way(begin_epoch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin_epoch)
    def check_and_begin_epoch(self: Any, epoch: int) -> Any:
        check_ways(self)
        return begin_epoch(self, epoch)

    return check_and_begin_epoch


WAYS_OF_TRAINING = Patch(
    name="ways of training",
    reason="Sharded or rounded tables, which would train silently wrong, are refused.",
    install=replaces({"fairseq.trainer:Trainer.begin_epoch": _checking_the_way}),
)


# The counts of ``--gradient-gating`` in checkpoints, so that a training resumes with them.
#
# A worker that has run out of batches repeats one and throws its gradient away: its words do not
# count. Neither do those of a step that is not taken because its gradients overflow in half
# precision; with ``--amp`` fairseq then takes the same batches again.


def _state_of(trainer: Any) -> Any:
    criterion = trainer.get_criterion()
    if not (isinstance(criterion, PenalisedCrossEntropy) and criterion.counts_words):
        return None
    memory = criterion.word_memory
    return memory.state_dict() if memory.has_counted else None


def _restore(trainer: Any, state: Any) -> None:
    criterion = trainer.get_criterion()
    if state is not None and isinstance(criterion, PenalisedCrossEntropy):
        criterion.word_memory.load_state_dict(state)


def _ignoring_repeats(prepare_sample: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(prepare_sample)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        sample, is_repeated = prepare_sample(self, *args, **kwargs)
        if isinstance(self.get_criterion(), PenalisedCrossEntropy):
            self.get_criterion().word_memory.ignored = is_repeated
        return sample, is_repeated

    return prepare


def _forgetting_overflows(train_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train_step)
    def begin_and_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        criterion = self.get_criterion()
        if isinstance(criterion, PenalisedCrossEntropy) and criterion.counts_words:
            criterion.word_memory.begin(self.get_num_updates())
        return train_step(self, *args, **kwargs)

    return begin_and_step


WORD_COUNTS = Patch(
    name="counts of gradient gating",
    reason="--gradient-gating resumes with the words that it has counted.",
    install=replaces(
        {
            **kept_in_checkpoints("gradient_gating", _state_of, _restore),
            "fairseq.trainer:Trainer._prepare_sample": _ignoring_repeats,
            "fairseq.trainer:Trainer.train_step": _forgetting_overflows,
        }
    ),
)


# Explain why a checkpoint's tables or output layer do not fit the model it is restored into.
#
# fairseq reports every error of restoring a model as "please ensure that the architectures match",
# and it cannot know that averaged factors make no table.


logger = logging.getLogger(__name__)

# Of the squared lengths of V's columns, which are 1. A mean of two unrelated V has one half; the
# drift of a training whose factors are not renewed stays above.
SHORTEST = 0.7


def check_experts(stored: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse a mixture of another number of experts than the model's, which may have none.

    Args:
        stored: names -> tensors of a checkpoint, as they are about to be loaded.
        model: the model to load them into.

    Raises:
        CheckpointError: the numbers differ.
    """
    found, wanted = (_experts(entries) for entries in (stored, model.state_dict()))
    if stored and found != wanted:
        raise CheckpointError(
            f"a checkpoint of {wanted}",
            f"one of {found}",
            "Use an arch of this package with the --output-head and --mixture-components of that "
            "checkpoint.",
        )


def _experts(entries: Mapping[str, Any]) -> str:
    for name, weight in entries.items():
        if name.endswith("output_projection.prior.weight") and getattr(weight, "ndim", 0) == 2:
            return f"a mixture of {len(weight)} experts"
    return "a single softmax"


def check_tables(stored: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse factored tables that a model does not have, and warn of averaged factors.

    Args:
        stored: names -> tensors of a checkpoint, as they are about to be loaded.
        model: the model to load them into.

    Raises:
        CheckpointError: a table of another kind than the model's.
    """
    entries_of = entries_by_module(stored)
    kinds = {module: factored_kind(entries) for module, entries in entries_of.items()}
    if not any(kinds.values()):
        return
    modules = entries_by_module(model.state_dict())
    for module, kind in kinds.items():
        entries = modules.get(module, {})
        wanted = factored_kind(entries)
        if kind is None or kind is wanted:
            continue
        expected = "without a table"
        if entries:
            expected = f"with a {wanted.kind} or plain table" if wanted else "with a plain table"
        raise CheckpointError(
            f"a checkpoint {expected} in {module}",
            f"one of --embedding-type {kind.kind}",
            "Use an arch of this package with the --embedding-type, --embedding-tables and sharing "
            "of that checkpoint; or, if it is of a Transformer, make it plain with "
            "spectral-fairseq export and start from that.",
        )
    found = (_column_length(entries_of[name]["V"]) for name in kinds if kinds[name] is SVDEmbedding)
    length = min(found, default=1.0)
    if length < SHORTEST:
        logger.warning(
            "expected an SVD table whose V has columns of length 1; found a mean square of %.2f. "
            "If fairseq's average_checkpoints.py made this checkpoint, it averaged factors of "
            "different decompositions, which make no table: use spectral-fairseq average.",
            length,
        )


def _column_length(v: Any) -> float:
    """The mean square of the lengths of V's columns, without their scale; 1 for what is no V."""
    if (
        not isinstance(v, Tensor)
        or v.dim() != 2
        or v.layout is not torch.strided
        or v.is_meta
        or not v.is_floating_point()
    ):
        return 1.0
    return float(v.float().square().sum(0).mean()) / V_SCALE**2


def _checking_kinds(upgrade_state_dict: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(upgrade_state_dict)
    def upgrade_and_check(self: Any, state_dict: Any) -> None:
        upgrade_state_dict(self, state_dict)
        check_tables(state_dict, self)
        check_experts(state_dict, self)

    return upgrade_and_check


def _explaining(load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_checkpoint)
    def load_or_explain(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return load_checkpoint(self, *args, **kwargs)
        except Exception as error:
            if isinstance(error.__context__, SpectralFairseqError):
                raise error.__context__ from None
            raise

    return load_or_explain


TABLE_KINDS = Patch(
    name="kinds of tables",
    reason="A checkpoint whose tables are stored in another way than the model's, or that is of "
    "another mixture, is refused with the remedy, where fairseq only says that the architectures "
    "differ; averages of factors get a warning.",
    install=replaces(
        {
            "fairseq.models:BaseFairseqModel.upgrade_state_dict": _checking_kinds,
            "fairseq.trainer:Trainer.load_checkpoint": _explaining,
        }
    ),
)


# Tables that start from word counts learn for which task they are built.
#
# fairseq passes the task to ``build_model`` of an architecture, but not on to ``build_embedding``.


def _telling_task(build_model: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build_model)
    def tell_and_build(cfg: Any, task: Any, *args: Any, **kwargs: Any) -> Any:
        from_checkpoint = bool(args[0] if args else kwargs.get("from_checkpoint", False))
        with building_for(task, from_checkpoint):
            return build_model(cfg, task, *args, **kwargs)

    return tell_and_build


TRAINING_COUNTS = Patch(
    name="training counts",
    reason="Weight-norm tables count </s> and <unk> in the training data of the task, which "
    "fairseq does not pass to what builds them.",
    install=replaces({"fairseq.models:build_model": _telling_task}),
)
