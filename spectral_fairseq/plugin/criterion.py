"""The criterion: cross entropy plus a sum of penalties; objective.py has their scale."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Dict, Iterable, List, Tuple
from weakref import WeakKeyDictionary

import torch
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.logging import metrics
from torch import nn

from spectral_fairseq import refusals
from spectral_fairseq.errors import DataError, arguments_as_flags, check_range
from spectral_fairseq.functional.blocks import check_label_smoothing
from spectral_fairseq.methods.penalties import AN_SVD_TABLE
from spectral_fairseq.methods.prior import TablePrior
from spectral_fairseq.options import idle_flags, read_options
from spectral_fairseq.plugin import control, likelihood, likelihood_choice
from spectral_fairseq.plugin.dropout import (
    FAIRSEQ_DROPOUT,
    FAST_DROPOUT,
    draw_masks_fast,
    draws_masks_fast,
)
from spectral_fairseq.plugin.find import (
    decoder_of,
    find_svd_tables,
    head_of,
    is_autoregressive,
    models_in,
    unwrapped,
)
from spectral_fairseq.plugin.likelihood import DROPOUT, LikelihoodTerm, drops
from spectral_fairseq.plugin.likelihood_choice import LossForm
from spectral_fairseq.plugin.listener import Listener
from spectral_fairseq.plugin.objective import (
    A_PENALTY,
    PENALTY_FLAGS,
    TERM_NAMES,
    DecoderTable,
    Parts,
    Penalties,
    Term,
    Words,
    prior_from_flags,
    reported_terms,
)
from spectral_fairseq.plugin.registry import with_options
from spectral_fairseq.plugin.spectrum_control import with_method
from spectral_fairseq.plugin.spectrum_log import (
    LOG_SPECTRUM_INTERVAL,
    TABLES_MEASURED,
    SpectrumLog,
    reduce_spectrum,
)

logger = logging.getLogger(__name__)

OPTIONS = (
    *PENALTY_FLAGS,
    *control.FLAGS,
    *likelihood.FLAGS,
    FAST_DROPOUT,
    LOG_SPECTRUM_INTERVAL,
)
PenalisedCriterionConfig = with_options(
    LabelSmoothedCrossEntropyCriterionConfig,
    "PenalisedCriterionConfig",
    OPTIONS,
    "The flags of ``label_smoothed_cross_entropy``, and those of every penalty.",
)


@dataclass(frozen=True)
class Objective:
    """What a criterion does with one model; it is decided once.

    Attributes:
        device: the model's device, by which the form of its loss is chosen.
        parts: what the model consists of.
        form: the form of the likelihood that is trained.
        likelihood: the likelihood that is trained.
        reported: the likelihood in evaluation.
        penalties: what is added to it in training.
        control: what is done to the tables outside the optimiser.
    """

    device: torch.device
    parts: Parts
    form: LossForm
    likelihood: LikelihoodTerm
    reported: LikelihoodTerm
    penalties: Penalties
    control: control.ControlledTables


class PenalisedCrossEntropy(LabelSmoothedCrossEntropyCriterion):
    """Base of the package's criterions, which differ only in their default weights.

    ``loss``, ``nll_loss`` and ``ppl`` in the logs stay those of the likelihood; each penalty is
    logged as R, before its weight, under a key of its own, in training only.

    Attributes:
        num_updates: the number of updates taken before the one under way; the trainer tells it.
    """

    def __init__(self, cfg: Any, task: Any) -> None:
        super().__init__(
            task,
            cfg.sentence_avg,
            cfg.label_smoothing,
            ignore_prefix_size=cfg.ignore_prefix_size,
            report_accuracy=cfg.report_accuracy,
        )
        # fairseq itself smooths with any number.
        with arguments_as_flags(label_smoothing="--label-smoothing"):
            check_label_smoothing(cfg.label_smoothing)
        check_range("--ignore-prefix-size", cfg.ignore_prefix_size, at_least=0, whole=True)
        self._said_that_nothing_counts = False
        self._cfg, self._task = cfg, task
        self._words: Dict[int, Words] = {}
        self._bound: WeakKeyDictionary[nn.Module, Objective] = WeakKeyDictionary()
        self._likelihood_options = likelihood.options_of(cfg)
        self._check_flags()
        self.num_updates = 0
        self.log_spectrum = SpectrumLog(LOG_SPECTRUM_INTERVAL.read(cfg))

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> PenalisedCrossEntropy:
        """Called by fairseq."""
        return cls(cfg, task)

    def _check_flags(self) -> None:
        """Refuse flags outside their range now rather than when a model is bound."""
        # The kind of table decides only flags that were not given, and what it chooses is in range.
        cfg = with_method(self._cfg, has_svd=True)
        prior_from_flags(cfg)
        read_options(PENALTY_FLAGS, cfg)
        control.rule_from_flags(cfg)
        control.SVD_INTERVAL.read(cfg)

    def objective_of(self, model: nn.Module) -> Objective:
        """What is done with a model, wrapped for data parallelism or not.

        It is made when a model is met first, and anew when it was moved to another device.
        """
        bound = self._bound.get(model)
        if bound is None or bound.device != next(model.parameters()).device:
            inner = unwrapped(model)
            # The norm that it remembers is that of the same table, wherever that is now.
            kept = prior_from_flags(self._cfg) if bound is None else bound.parts.prior
            bound = self._bind(model, kept) if inner is model else self.objective_of(inner)
            self._bound[model] = bound
        return bound

    def objectives_of(self, model: nn.Module) -> List[Objective]:
        """Those of a trainer's model: of several where it holds several."""
        return [self.objective_of(inner) for inner in models_in(unwrapped(model))]

    def _bind(self, model: nn.Module, table_prior: TablePrior) -> Objective:
        decoder, tables = decoder_of(model), find_svd_tables(model)
        if self._cfg.fast_dropout:
            draw_masks_fast(model)
        # A task for several target languages has a dictionary for each, of which it shows the
        # criterion only the first.
        dictionary = getattr(decoder, "dictionary", None)
        words = self._words_of(self._task.target_dictionary if dictionary is None else dictionary)
        name = type(model).__name__
        parts = Parts(decoder, words, table_prior, tables, name)
        options = self._likelihood_options
        form = likelihood_choice.form_for(self, options, model, words.rows)
        trained = likelihood_choice.trained_form(options, form, head_of(model))
        cfg = with_method(self._cfg, bool(tables))
        return Objective(
            next(model.parameters()).device,
            parts,
            trained,
            likelihood_choice.likelihood_term(self, parts, options, trained),
            likelihood_choice.plain_likelihood(self, parts, form),
            Penalties(cfg, parts),
            control.ControlledTables(cfg, parts, self._cfg),
        )

    def _words_of(self, dictionary: Any) -> Words:
        if id(dictionary) not in self._words:
            self._words[id(dictionary)] = Words(dictionary, self._task)
        return self._words[id(dictionary)]

    @torch.no_grad()
    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that lacks what the flags need, before training starts.

        It trains nothing: without gradients no table follows its own training. Where
        ``--fast-dropout`` is given, the model's dropout layers are replaced.

        Raises:
            ConfigurationError: no table for a flag, or one that is not trained; no output layer
                that can be replaced; fairseq's adaptive softmax; or label smoothing where the
                output layer's own loss has none; or a non-autoregressive model.
        """
        models, options = models_in(unwrapped(model)), self._likelihood_options
        for inner in models:
            if not is_autoregressive(inner):
                raise refusals.NON_AUTOREGRESSIVE.error(f"{type(inner).__name__}, which does not")
            if getattr(decoder_of(inner), "adaptive_softmax", None) is not None:
                raise refusals.ADAPTIVE_SOFTMAX.error("fairseq's adaptive softmax")
        bound = [self.objective_of(inner) for inner in models]
        idle = [self._idle_flags(inner, objective) for inner, objective in zip(models, bound)]
        for flag in (flag for flag in idle[0] if all(flag in other for other in idle)):
            logger.warning("%s has no effect without %s", flag, idle[0][flag])
        for inner, objective in zip(models, bound):
            objective.penalties.check(inner)
            objective.control.check()
            self.log_spectrum.check(DecoderTable(objective.parts))
            saves = options.loss_form == "blockwise"
            saves |= options.loss_form == "auto" and objective.reported.own_loss
            if self.report_accuracy and saves and not objective.likelihood.flag:
                logger.warning(
                    "--report-accuracy makes the scores of all words, which the loss of this "
                    "output layer would do without; drop it where they take too much memory"
                )

    def _idle_flags(self, model: nn.Module, bound: Objective) -> Dict[str, str]:
        """Flags that were given and have no effect on a model -> what they would need."""
        has_svd = bool(bound.parts.svd_tables)
        facts = {
            A_PENALTY: bound.penalties.active,
            AN_SVD_TABLE: has_svd,
            DROPOUT: drops(model),
            FAIRSEQ_DROPOUT: draws_masks_fast(model),
        }
        values = read_options(OPTIONS, with_method(self._cfg, has_svd))
        defaults = SimpleNamespace(**{entry.name: entry.parsed(entry.default) for entry in OPTIONS})
        return idle_flags(OPTIONS, values, defaults, facts)

    def forward(self, model: nn.Module, sample: Any, reduce: bool = True) -> Tuple[Any, Any, Any]:
        """As ``label_smoothed_cross_entropy``, with the penalties added to the loss in training.

        The losses of single tokens (``reduce=False``) are those of the likelihood.
        """
        if self.ignore_prefix_size:
            self._look_at_prefix(sample)
        bound = self.objective_of(model)
        if not model.training:
            computed = bound.reported(model, sample, reduce)
            log = self._logging_output(computed, model, sample)
            log.update(self.log_spectrum(DecoderTable(bound.parts), self.num_updates))
            return computed.loss, log["sample_size"], log
        computed = bound.likelihood(model, sample, reduce)
        log = self._logging_output(computed, model, sample)
        # fairseq sets the loss of an idle worker to zero in place, which some views do not allow.
        loss, sample_size = computed.loss.clone(), log["sample_size"]
        due = bound.penalties(self.num_updates)
        due.extend(reported_terms(computed.net_output))
        for term in due if reduce else ():
            # See Note [The scale of a penalty].
            loss = loss + term.weight * term.value * sample_size
        due.extend(computed.measures)
        log.update(log_terms(due, bound.penalties.last(), sample_size))
        return loss, sample_size, log

    def _look_at_prefix(self, sample: Any) -> None:
        """Warn once if no target of a batch counts, of which fairseq says nothing."""
        length, size = sample["target"].size(-1), self.ignore_prefix_size
        if length <= size and not self._said_that_nothing_counts:
            self._said_that_nothing_counts = True
            logger.warning(
                f"the loss of a batch is 0, because its sentences have at most {length} tokens and "
                f"--ignore-prefix-size is {size}"
            )

    def _logging_output(
        self, computed: likelihood.Likelihood, model: nn.Module, sample: Any
    ) -> Dict[str, Any]:
        """The logging output of ``label_smoothed_cross_entropy``."""
        log = {
            "loss": computed.logged_loss,
            "nll_loss": computed.logged_nll,
            "ntokens": sample["ntokens"],
            "nsentences": sample["target"].size(0),
            "sample_size": sample["target"].size(0) if self.sentence_avg else sample["ntokens"],
        }
        if self.report_accuracy:
            n_correct, total = self.compute_accuracy(model, computed.net_output, sample)
            log["n_correct"], log["total"] = int(n_correct), int(total)
        return log

    @classmethod
    def reduce_metrics(cls, logging_outputs: List[Dict[str, Any]]) -> None:
        """Called by fairseq: log the likelihood's metrics, each penalty's R and the spectrum.

        Where there was no token, the loss is None, which counts for nothing in averages.

        Raises:
            DataError: there was no batch, as where ``fairseq-validate`` skipped all examples.
        """
        if not logging_outputs:
            raise DataError(
                "examples that the model can read",
                "no batch, as all were skipped",
                "Give --max-source-positions, --max-target-positions and --max-tokens to suit.",
            )
        if sum(log.get("ntokens", 0) for log in logging_outputs):
            super().reduce_metrics(logging_outputs)
        else:  # of no tokens there is no mean: neither nan, as after a divergence, nor 0
            for name in ("loss", "nll_loss"):
                metrics.log_scalar(name, None, 0)
        reduce_terms(logging_outputs, TERM_NAMES)
        if any(TABLES_MEASURED in log for log in logging_outputs):
            reduce_spectrum(logging_outputs)


def objectives_in(trainer: Any) -> List[Objective]:
    """What is done with each model of a trainer; nothing under another criterion."""
    criterion = trainer.get_criterion()
    if not isinstance(criterion, PenalisedCrossEntropy):
        return []
    return criterion.objectives_of(trainer.get_model())


class Updates(Listener):
    """Tells the criterion the number of updates, which fairseq tells to none."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._criterion = trainer.get_criterion()

    @property
    def is_active(self) -> bool:
        """Whether the criterion is one of this package."""
        return isinstance(self._criterion, PenalisedCrossEntropy)

    def after_update(self) -> None:
        """Lazy penalties, and measures in validation, depend on it."""
        self._criterion.num_updates = self.trainer.get_num_updates()

    def after_loading(self, extra_state: Dict[str, Any]) -> None:  # noqa: ARG002
        """See :meth:`after_update`."""
        self.after_update()


def log_terms(due: Iterable[Term], last: Iterable[Term], sample_size: int) -> Dict[str, Any]:
    """Entries of a logging output: R of each penalty before its weight, under its name.

    A value is logged times the sample size, because fairseq adds up the logs of workers and micro-
    batches. ``<name>_size`` is the weight of the value in averages over several updates.

    Args:
        due: the terms of this update.
        last: terms as they were computed last; those that are not due are shown, but have no
            weight in averages.
        sample_size: that of the micro-batch.
    """
    entries: Dict[str, Any] = {}
    for terms, size in ((due, sample_size), (last, 0)):
        for term in terms:
            if term.name not in entries:
                entries[term.name] = term.value.detach() * sample_size
                entries[f"{term.name}_size"] = size
    return entries


def reduce_terms(logging_outputs: List[Dict[str, Any]], names: Iterable[str]) -> None:
    """Show the R of each penalty, from the logging outputs of all workers and micro-batches."""
    for name in names:
        shown = total = due = 0
        for log in logging_outputs:
            if name in log:
                shown += log["sample_size"]
                total += log[name]
                due += log[f"{name}_size"]
        if shown > 0:
            metrics.log_scalar(name, total / shown, due, round=5)
