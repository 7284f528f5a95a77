"""Modules learn the epoch and the number of updates; criterions check models before training.

fairseq tells the epoch to tasks, datasets and schedulers but to no module. It passes the number of
updates to modules that define ``set_num_updates`` but keeps it nowhere, and some of its tasks, such
as ``multilingual_translation``, do not pass it on. Both are restored when training resumes.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.models import BaseFairseqModel

from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.embeddings import WeightNormEmbedding
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.heads import Head
from spectral_fairseq.plugin.criterions.penalised import PenalisedCrossEntropy
from spectral_fairseq.plugin.criterions.updates import tell_updates
from spectral_fairseq.plugin.models.awd_lstm import AWDLSTMLanguageModel
from spectral_fairseq.plugin.models.options import warn_of_idle_options
from spectral_fairseq.plugin.models.output_table import head_of
from spectral_fairseq.plugin.models.transformer_xl import TransformerXLLanguageModel

_CHECKED = "_spectral_fairseq_checked"


def _check(trainer: Any) -> None:
    model, criterion = trainer.get_model(), trainer.get_criterion()
    if isinstance(criterion, AdaptiveLoss) and isinstance(head_of(model), Head):
        raise ConfigurationError(
            "a criterion that asks no more of the model than probabilities",
            "--criterion adaptive_loss, which asks for fairseq's own adaptive softmax",
            "Use --criterion mle_cosreg --cosreg-weight 0: cross entropy, which with an adaptive "
            "softmax of this package computes only the clusters of the targets.",
        )
    warn_of_idle_options(model, trainer.cfg.model)
    if isinstance(criterion, PenalisedCrossEntropy):
        criterion.check_model(model)
        criterion.log_spectrum.check_metric(trainer.cfg.checkpoint.best_checkpoint_metric)
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


def _keeping_updates(set_num_updates: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(set_num_updates)
    def set_and_keep(self: Any, num_updates: int) -> Any:
        tell_updates(self, num_updates)
        return set_num_updates(self, num_updates)

    return set_and_keep


def _telling_updates(train_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train_step)
    def tell_and_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        for module in self.get_model().modules():
            if isinstance(module, BaseFairseqModel):  # the model, and each model inside it
                tell_updates(module, self.get_num_updates())
        return train_step(self, *args, **kwargs)

    return tell_and_step


PATCH = Patch(
    name="training progress",
    reason="Weight-norm tables and lazy penalties depend on the epoch or the number of updates, "
    "and criterions check the model before training.",
    install=replaces(
        {
            "fairseq.trainer:Trainer.begin_epoch": _telling_epoch,
            "fairseq.trainer:Trainer.train_step": _telling_updates,
            "fairseq.models:BaseFairseqModel.set_num_updates": _keeping_updates,
        }
    ),
)
