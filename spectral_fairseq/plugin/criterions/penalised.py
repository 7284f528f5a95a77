"""Cross entropy plus any sum of penalties; see penalties/objective.py for their scale."""

from __future__ import annotations

import logging
from typing import Any, Dict, List, Optional, Tuple

import torch
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.models import FairseqMultiModel
from torch import nn

from spectral_fairseq.errors import ConfigurationError, arguments_as_flags
from spectral_fairseq.functional.softmax_loss import smoothing_weights
from spectral_fairseq.plugin.criterions import likelihood, table_control, table_prior, unset
from spectral_fairseq.plugin.criterions.ignored_prefix import IgnoredPrefix
from spectral_fairseq.plugin.criterions.likelihood.word_memory import WordMemory
from spectral_fairseq.plugin.criterions.penalties import objective
from spectral_fairseq.plugin.criterions.penalties.activation import reported_terms
from spectral_fairseq.plugin.criterions.penalties.logs import log_terms, reduce_terms
from spectral_fairseq.plugin.criterions.spectrum_log import (
    LOG_SPECTRUM_INTERVAL,
    SpectrumLog,
    reduce_spectrum,
)
from spectral_fairseq.plugin.flags import read_flags, retired, with_flags
from spectral_fairseq.plugin.models.output_table import decoder_of, has_svd_table, head_of

logger = logging.getLogger(__name__)

# Commands and checkpoints of earlier versions may name them.
RETIRED = (
    retired("isoscore_weight", 0.0, "the penalty on the IsoScore showed no gain"),
    retired("input_gradient_scale", 1.0, "scaling the gradient of the look-ups showed no gain"),
)

PenalisedCriterionConfig = with_flags(
    LabelSmoothedCrossEntropyCriterionConfig,
    "PenalisedCriterionConfig",
    (
        *objective.FLAGS,
        *table_control.FLAGS,
        *likelihood.FLAGS,
        LOG_SPECTRUM_INTERVAL,
        *RETIRED,
    ),
    "The flags of ``label_smoothed_cross_entropy``, and those of every penalty.",
)


class PenalisedCrossEntropy(LabelSmoothedCrossEntropyCriterion):
    """Base of the package's criterions, which differ only in their default weights.

    ``loss``, ``nll_loss`` and ``ppl`` in the logs stay those of the likelihood; each penalty is
    logged as R, before its weight, under a key of its own, in training only.
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
            smoothing_weights(cfg.label_smoothing, vocabulary=2)
        self._ignored_prefix = IgnoredPrefix(cfg.ignore_prefix_size)
        self._cfg, self._task = cfg, task
        self._has_svd: Optional[bool] = None
        self._renewable = True
        self._complete(has_svd=True)
        self._likelihood_options = likelihood.read_options(cfg)
        read_flags(RETIRED, cfg)
        self.word_memory = WordMemory(
            len(task.target_dictionary),
            self._likelihood_options.gradient_gating_memory,
        )
        self.log_spectrum = SpectrumLog(LOG_SPECTRUM_INTERVAL.read(cfg))

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> PenalisedCrossEntropy:
        """Called by fairseq."""
        return cls(cfg, task)

    def suit(self, model: nn.Module) -> None:
        """Complete the flags that were not given by the kind of table that the model has."""
        if unset.has_unset(self._cfg):
            self._complete(has_svd_table(model))

    @property
    def renewal_is_asked_for(self) -> bool:
        """Whether ``--svd-interval`` was given, rather than left to the kind of table."""
        return self._cfg.svd_interval is not None

    @property
    def counts_words(self) -> bool:
        """Whether ``--gradient-gating`` counts words in :attr:`word_memory`."""
        return self._likelihood_options.gradient_gating > 0

    def do_without_renewal(self) -> None:
        """Train as with ``--svd-interval 0`` where that flag was not given."""
        has_svd, self._has_svd = bool(self._has_svd), None
        self._renewable = False
        self._complete(has_svd)

    def _complete(self, has_svd: bool) -> None:
        if has_svd is not self._has_svd:
            cfg = unset.Completed(self._cfg, has_svd, self._renewable)
            self.penalties = objective.Penalties(cfg, self._task)
            self.table_control = table_control.TableControl(cfg)
            self._has_svd = has_svd

    @torch.no_grad()
    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that lacks what the flags need, before training starts.

        It leaves the model as it is: without gradients no table follows its own training.

        Raises:
            ConfigurationError: no table for a flag, or one that is not trained; no output layer
                that can be replaced; fairseq's adaptive softmax; or label smoothing where the
                output layer's own loss has none.
        """
        self.suit(model)
        idle = {
            **self.penalties.idle_flags(),
            **likelihood.idle_flags(self._likelihood_options, model),
            **self.table_control.idle_flags(),
        }
        if has_svd_table(model) or self.table_control.reads_prior:
            for flag in table_prior.FLAGS:  # which a penalty is not alone to read
                idle.pop(flag.option, None)
        for option, needed in idle.items():
            logger.warning("%s has no effect without %s", option, needed)
        for one in model.models.values() if isinstance(model, FairseqMultiModel) else (model,):
            self.penalties.check(one)
            self.table_control.check(self.penalties.view(one))
            self.log_spectrum.check(self.penalties.view(one))
            _refuse_fairseqs_adaptive_softmax(one)
        self._likelihood(model).check(model)

    def forward(self, model: nn.Module, sample: Any, reduce: bool = True) -> Tuple[Any, Any, Any]:
        """As ``label_smoothed_cross_entropy``, with the penalties added to the loss in training."""
        self.suit(model)
        self._ignored_prefix.look_at(sample)
        if not model.training:
            return self._evaluate(model, sample, reduce)
        found = self._likelihood(model)(model, sample, reduce)
        log = self._logging_output(found, model, sample)
        loss, sample_size = found.loss, log["sample_size"]
        due = self.penalties(model) + reported_terms(found.net_output)
        for term in due:
            # See Note [The scale of a penalty].
            loss = loss + term.weight * term.value * sample_size
        due.extend(found.measures)
        log.update(log_terms(due, self.penalties.last(model), sample_size))
        return loss, sample_size, log

    def _evaluate(self, model: nn.Module, sample: Any, reduce: bool) -> Tuple[Any, Any, Any]:
        if getattr(head_of(model), "own_loss_in_evaluation", False):
            found = self._likelihood(model)(model, sample, reduce)
            loss, log = found.loss, self._logging_output(found, model, sample)
        else:
            loss, _, log = super().forward(model, sample, reduce=reduce)
        log.update(self.log_spectrum(self.penalties.view(model)))
        return loss, log["sample_size"], log

    def _logging_output(
        self, found: likelihood.Likelihood, model: nn.Module, sample: Any
    ) -> Dict[str, Any]:
        """The logging output of ``label_smoothed_cross_entropy``."""
        log = {
            "loss": found.logged_loss,
            "nll_loss": found.logged_nll,
            "ntokens": sample["ntokens"],
            "nsentences": sample["target"].size(0),
            "sample_size": sample["target"].size(0) if self.sentence_avg else sample["ntokens"],
        }
        if self.report_accuracy:
            n_correct, total = self.compute_accuracy(model, found.net_output, sample)
            log["n_correct"], log["total"] = int(n_correct), int(total)
        return log

    def _likelihood(self, model: nn.Module) -> likelihood.LikelihoodTerm:
        return likelihood.likelihood_term(self, self._likelihood_options, model)

    @classmethod
    def reduce_metrics(cls, logging_outputs: List[Dict[str, Any]]) -> None:
        """Called by fairseq: log the likelihood's metrics, each penalty's R and the spectrum."""
        super().reduce_metrics(logging_outputs)
        reduce_terms(logging_outputs)
        reduce_spectrum(logging_outputs)


def _refuse_fairseqs_adaptive_softmax(model: nn.Module) -> None:
    if getattr(decoder_of(model), "adaptive_softmax", None) is not None:
        raise ConfigurationError(
            "an output layer whose log-probabilities have a gradient",
            "fairseq's adaptive softmax, which is trained by a loss of its own",
            "Drop --adaptive-softmax-cutoff, or use --criterion adaptive_loss.",
        )
