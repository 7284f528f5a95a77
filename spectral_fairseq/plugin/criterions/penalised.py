"""Cross entropy plus any sum of penalties; see penalties/objective.py for their scale."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.models import FairseqMultiModel
from torch import nn

from spectral_fairseq.errors import arguments_as_flags
from spectral_fairseq.functional.losses.blockwise import smoothing_weights
from spectral_fairseq.plugin.criterions import likelihood
from spectral_fairseq.plugin.criterions.penalties import objective
from spectral_fairseq.plugin.criterions.penalties.activation import reported_terms
from spectral_fairseq.plugin.criterions.penalties.logs import log_terms, reduce_terms
from spectral_fairseq.plugin.criterions.spectrum_log import (
    LOG_SPECTRUM_INTERVAL,
    SpectrumLog,
    reduce_spectrum,
)
from spectral_fairseq.plugin.flags import read_flags, with_flags

PenalisedCriterionConfig = with_flags(
    LabelSmoothedCrossEntropyCriterionConfig,
    "PenalisedCriterionConfig",
    (*objective.FLAGS, *likelihood.FLAGS, LOG_SPECTRUM_INTERVAL),
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
        self.penalties = objective.Penalties(cfg, task.target_dictionary)
        self._likelihood_options = read_flags(likelihood.FLAGS, cfg)
        self._log_spectrum = SpectrumLog(LOG_SPECTRUM_INTERVAL.read(cfg))

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> PenalisedCrossEntropy:
        """Called by fairseq."""
        return cls(cfg, task)

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that lacks what the flags need, before training starts.

        Raises:
            ConfigurationError: no table for a penalty, no output layer that can be replaced, or
                label smoothing where the output layer's own loss has none.
        """
        for one in model.models.values() if isinstance(model, FairseqMultiModel) else (model,):
            self.penalties.check(one)
        self._likelihood(model).check(model)

    def forward(self, model: nn.Module, sample: Any, reduce: bool = True) -> Tuple[Any, Any, Any]:
        """As ``label_smoothed_cross_entropy``, with the penalties added to the loss in training."""
        head = likelihood.output_layer_of(model)
        if not model.training and not getattr(head, "own_loss_in_evaluation", False):
            loss, sample_size, logging_output = super().forward(model, sample, reduce=reduce)
            logging_output.update(self._log_spectrum(self.penalties.view(model)))
            return loss, sample_size, logging_output
        found = self._likelihood(model)(model, sample, reduce)
        loss = found.loss
        sample_size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        logging_output = {
            "loss": found.logged_loss,
            "nll_loss": found.logged_nll,
            "ntokens": sample["ntokens"],
            "nsentences": sample["target"].size(0),
            "sample_size": sample_size,
        }
        if self.report_accuracy:
            n_correct, total = self.compute_accuracy(model, found.net_output, sample)
            logging_output["n_correct"], logging_output["total"] = int(n_correct), int(total)
        if not model.training:
            logging_output.update(self._log_spectrum(self.penalties.view(model)))
            return loss, sample_size, logging_output
        due = self.penalties(model) + reported_terms(found.net_output)
        for term in due:
            # See Note [The scale of a penalty].
            loss = loss + term.weight * term.value * sample_size
        logging_output.update(log_terms(due, self.penalties.last(model), sample_size))
        return loss, sample_size, logging_output

    def _likelihood(self, model: nn.Module) -> likelihood.LikelihoodTerm:
        return likelihood.likelihood_term(self, self._likelihood_options, model)

    @classmethod
    def reduce_metrics(cls, logging_outputs: List[Dict[str, Any]]) -> None:
        """Called by fairseq: log the likelihood's metrics, each penalty's R and the spectrum."""
        super().reduce_metrics(logging_outputs)
        reduce_terms(logging_outputs)
        reduce_spectrum(logging_outputs)
