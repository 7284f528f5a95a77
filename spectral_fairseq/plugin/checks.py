"""What is checked of a model before it is trained."""

from __future__ import annotations

import logging

from fairseq.criterions.adaptive_loss import AdaptiveLoss
from torch import nn

from spectral_fairseq import refusals
from spectral_fairseq.embeddings import PlainEmbedding, SVDEmbedding, Table, WeightNormEmbedding
from spectral_fairseq.embeddings.weight_norm import tell_epoch
from spectral_fairseq.heads import Head, SoftmaxHead
from spectral_fairseq.plugin.awd_lstm import AWDLSTMLanguageModel
from spectral_fairseq.plugin.criterion import PenalisedCrossEntropy
from spectral_fairseq.plugin.find import head_of
from spectral_fairseq.plugin.listener import Listener
from spectral_fairseq.plugin.quantisation import check_quantisation
from spectral_fairseq.plugin.table_and_head import warn_of_idle_options
from spectral_fairseq.plugin.transformer_xl import TransformerXLLanguageModel

logger = logging.getLogger(__name__)


class WaysOfTraining(Listener):
    """Refuses ways of training that would run, and would train something else or nothing."""

    def begin_training(self) -> None:
        """Refuse sharded tables, and tables that half precision or quantisation keeps still."""
        modules = list(self.trainer.get_model().modules())
        ours = isinstance(self.trainer.get_criterion(), PenalisedCrossEntropy)
        if ours or any(map(_is_own, modules)):
            refusals.SHARDED.check(self.trainer.cfg)
        if any(isinstance(module, (SVDEmbedding, WeightNormEmbedding)) for module in modules):
            refusals.ROUNDED.check(self.trainer.cfg)
        check_quantisation(self.trainer)


def _is_own(module: nn.Module) -> bool:
    plain = isinstance(module, (PlainEmbedding, SoftmaxHead))
    return isinstance(module, (Table, Head)) and not plain


class Checks(Listener):
    """Lets the criterion check the model, and tells tables the epoch.

    fairseq tells the epoch to tasks, datasets and schedulers but to no module.
    """

    def begin_training(self) -> None:
        """Refuse what cannot be trained, and warn of flags without effect."""
        trainer = self.trainer
        model, criterion = trainer.get_model(), trainer.get_criterion()
        if isinstance(criterion, AdaptiveLoss) and isinstance(head_of(model), Head):
            raise refusals.ADAPTIVE_LOSS.error("--criterion adaptive_loss")
        warn_of_idle_options(model, trainer.cfg.model)
        if isinstance(criterion, PenalisedCrossEntropy):
            criterion.check_model(model)
            criterion.log_spectrum.check_metric(trainer.cfg.checkpoint.best_checkpoint_metric)
            for form in {str(objective.form) for objective in criterion.objectives_of(model)}:
                logger.info("the form of the loss is %s", form)
        elif isinstance(model, (AWDLSTMLanguageModel, TransformerXLLanguageModel)):
            model.warn_of_other_criterion(type(criterion).__name__)

    def begin_epoch(self, epoch: int) -> None:
        """Tell weight-norm tables, whose lengths may be frozen for some epochs."""
        tell_epoch(self.trainer.get_model(), epoch)
