"""What is checked of a model before it is trained; ``restoring.py`` checks what is restored."""

from __future__ import annotations

import logging
from typing import Any, Callable, Iterator, List, Set, Tuple

from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.modules.quantization.pq.utils import get_layers
from fairseq.modules.quantization.scalar.modules import IntLinear
from torch import nn

from spectral_fairseq import refusals
from spectral_fairseq.compat.patching import Patch, replaces, wrapping
from spectral_fairseq.embeddings import (
    PlainEmbedding,
    SVDEmbedding,
    Table,
    WeightNormEmbedding,
)
from spectral_fairseq.embeddings.weight_norm import tell_epoch
from spectral_fairseq.heads import Head, SoftmaxHead
from spectral_fairseq.plugin.awd_lstm import AWDLSTMLanguageModel
from spectral_fairseq.plugin.criterion import Objective, PenalisedCrossEntropy
from spectral_fairseq.plugin.find import head_of
from spectral_fairseq.plugin.groups import table_options
from spectral_fairseq.plugin.likelihood import LOSS_FORM
from spectral_fairseq.plugin.listener import Listener
from spectral_fairseq.plugin.objective import Inputs
from spectral_fairseq.plugin.optimizers import table_parameters
from spectral_fairseq.plugin.registry import (
    TABLE_LR_SCALE,
    TABLE_WEIGHT_DECAY,
    warn_of_idle_options,
)
from spectral_fairseq.plugin.transformer_xl import TransformerXLLanguageModel

logger = logging.getLogger(__name__)


# What fairseq's quantisation takes from under a feature is refused before training.
#
# ``--quantization-config-path`` replaces layers when the first epoch begins and between its
# stages: what a feature holds of the layer before is then no part of the model, and its work has no
# effect. ``--quant-noise-scalar`` lets an output layer compute its scores from a quantised copy of
# its table.


_FLAG = "--quantization-config-path"


def check_quantisation(trainer: Any) -> None:
    """Refuse what quantisation would leave without effect, or end later.

    Args:
        trainer: fairseq's, before its first epoch.

    Raises:
        UnsupportedError: a layer to be replaced that something holds; an optimiser to be built anew
            that has to last; or scores that would not be those of the output layer.
    """
    quantizer = getattr(trainer, "quantizer", None)
    if quantizer is not None:
        _check_optimizer(trainer, quantizer)
        _check_layers(trainer, quantizer.layers_to_quantize)
    for one in _objectives(trainer):
        flag = _flag_of_own_scores(one)
        if flag:
            refusals.QUANTISED_SCORES.check(trainer.cfg, flag)


def _objectives(trainer: Any) -> List[Objective]:
    criterion = trainer.get_criterion()
    if not isinstance(criterion, PenalisedCrossEntropy):
        return []
    return criterion.objectives_of(trainer.get_model())


def _optimizer_of(trainer: Any) -> str:
    return str(getattr(trainer.cfg.optimizer, "_name", ""))


def _check_optimizer(trainer: Any, quantizer: Any) -> None:
    name = _optimizer_of(trainer)
    # Between epochs coupled_adam is told its tables again.
    within_epochs = getattr(quantizer, "update_schedule", None) is not None
    if name in ("muon", "nt_asgd") or (name == "coupled_adam" and within_epochs):
        raise refusals.REBUILT_OPTIMIZER.error(_FLAG, f"--optimizer {name}")


def _check_layers(trainer: Any, patterns: List[str]) -> None:
    model = trainer.get_model()
    modules = dict(model.named_modules())
    names = [name for pattern in patterns for name in get_layers(model, pattern)]
    for name in names:
        parts = name.split(".")
        owners = (modules.get(".".join(parts[:end])) for end in range(1, len(parts) + 1))
        for owner in owners:
            if isinstance(owner, (Table, Head)):
                _refuse(name, f"a {type(owner).__name__}")
    replaced = {name: modules[name] for name in names if name in modules}
    for flag, held in _held(trainer):
        for name, module in replaced.items():
            if held & {id(module), *map(id, module.parameters(recurse=False))}:
                _refuse(name, flag)


def _refuse(name: str, ours: str) -> None:
    raise refusals.REPLACED_LAYERS.error(f"{_FLAG} that replaces {name}", ours)


def _held(trainer: Any) -> Iterator[Tuple[str, Set[int]]]:
    """Flags, and the ids of the parameters or modules that they hold on to."""
    model = trainer.get_model()
    if _optimizer_of(trainer) == "coupled_adam":
        yield "--optimizer coupled_adam", _ids(table_parameters(model))
    objectives = _objectives(trainer)
    if objectives:
        own = table_options(trainer.cfg, model, trainer.task).parameters
        yield f"{TABLE_LR_SCALE.flag} or {TABLE_WEIGHT_DECAY.flag}", _ids(own)
    for one in objectives:
        for table in one.control.controlled(Inputs(one.parts)):
            yield table.flag, _ids([table.parameter])
        yield one.likelihood.flag, _ids(one.likelihood.held)


def _ids(held: Any) -> Set[int]:
    return {id(one) for one in held}


def _flag_of_own_scores(one: Objective) -> str:
    """The flag for which scores are computed beside fairseq's output layer; empty without one."""
    term = one.likelihood
    if not isinstance(term.head, IntLinear):  # of tied tables fairseq quantises the look-up alone
        return ""
    if term.makes_scores:
        return term.flag
    return f"{LOSS_FORM.flag} blockwise" if one.form.blockwise else ""


# Models before training.


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
            for form in {str(one.form) for one in criterion.objectives_of(model)}:
                logger.info("the form of the loss is %s", form)
        elif isinstance(model, (AWDLSTMLanguageModel, TransformerXLLanguageModel)):
            model.warn_of_other_criterion(type(criterion).__name__)

    def begin_epoch(self, epoch: int) -> None:
        """Tell weight-norm tables, whose lengths may be frozen for some epochs."""
        tell_epoch(self.trainer.get_model(), epoch)


@wrapping
def _checking_kinds(self: Any, state_dict: Any, *, original: Callable[..., None]) -> None:
    from spectral_fairseq.plugin.restoring import check_restored

    original(self, state_dict)
    check_restored(state_dict, self)


TABLE_KINDS = Patch(
    name="kinds of tables",
    reason="A checkpoint whose tables are stored in another way than the model's, or that is of "
    "another mixture, is refused with the remedy, where fairseq only says that the architectures "
    "differ; so are two tables for one of the model, of which fairseq takes the last; averages of "
    "factors get a warning.",
    install=replaces({"fairseq.models:BaseFairseqModel.upgrade_state_dict": _checking_kinds}),
)
