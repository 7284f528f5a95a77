"""Cross entropy plus any sum of the papers' penalties, at a scale that means the same everywhere.

Note [The scale of a penalty]
-----------------------------
Worker w and micro-batch i contribute the gradient of their loss L_wi; fairseq divides the sum by
S, the sample sizes added up. With

    L_wi = nll_sum_wi + weight * R * sample_size_wi

the objective is (mean NLL per token) + weight * R exactly, whatever the batch size,
``--update-freq`` or number of workers. Without the factor a penalty would be thousands of times
too weak, and its strength would change with the batch.
"""

# No "from __future__ import annotations" here: fairseq and omegaconf read the field types.
import math
from dataclasses import dataclass, field
from typing import Any, Dict, List, Tuple

import torch
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.logging import metrics
from torch import Tensor, nn

from spectral_fairseq.embeddings.svd import SVDEmbedding
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.orthogonality import orthogonality_penalty
from spectral_fairseq.functional.spectrum import spectrum_penalty


@dataclass
class PenalisedCriterionConfig(LabelSmoothedCrossEntropyCriterionConfig):
    """The flags of ``label_smoothed_cross_entropy``, and a weight for each penalty."""

    spectrum_weight: float = field(
        default=0.0,
        metadata={
            "help": "lambda_e or lambda_p: weight of sum_k (sigma_k - prior_k)^2 of an SVD table"
        },
    )
    orthogonality_weights: str = field(
        default="0,0,0,0",
        metadata={
            "help": "l1,l2,l3,l4: weights of ||U'U-I||_F^2, ||V'V-I||_F^2, ||U'U-I||_2^2 and "
            "||V'V-I||_2^2 of an SVD table"
        },
    )


def checked_weight(flag: str, value: float) -> float:
    """``value`` as a weight.

    Raises:
        ConfigurationError: negative, infinite or not a number.
    """
    if not (math.isfinite(value) and value >= 0):
        raise ConfigurationError(f"{flag} to be a finite number >= 0", repr(value), "Correct it.")
    return value


def parse_orthogonality_weights(text: str) -> Tuple[float, float, float, float]:
    """The four numbers of ``--orthogonality-weights``.

    Raises:
        ConfigurationError: not four numbers, or one of them no weight.
    """
    flag = "--orthogonality-weights"
    try:
        l1, l2, l3, l4 = (float(part) for part in str(text).split(","))
    except ValueError:
        raise ConfigurationError(
            f"{flag} to be four numbers separated by commas, l1,l2,l3,l4", repr(text),
            "For example: --orthogonality-weights 0.01,0.01,0,0.",
        ) from None
    for weight in (l1, l2, l3, l4):
        checked_weight(flag, weight)
    return l1, l2, l3, l4


class PenalisedCrossEntropy(LabelSmoothedCrossEntropyCriterion):
    """Base of the package's criterions, which differ only in their default weights.

    ``loss``, ``nll_loss`` and ``ppl`` in the logs stay those of the likelihood; each penalty is
    logged as R, before its weight, under a key of its own, in training only.
    """

    PENALTIES = ("spectrum", "orthogonality")

    def __init__(self, cfg: Any, task: Any) -> None:
        super().__init__(
            task,
            cfg.sentence_avg,
            cfg.label_smoothing,
            ignore_prefix_size=cfg.ignore_prefix_size,
            report_accuracy=cfg.report_accuracy,
        )
        self.spectrum_weight = checked_weight("--spectrum-weight", cfg.spectrum_weight)
        self.orthogonality_weights = parse_orthogonality_weights(cfg.orthogonality_weights)

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> "PenalisedCrossEntropy":
        """fairseq's hook."""
        return cls(cfg, task)

    def forward(self, model: nn.Module, sample: Any, reduce: bool = True) -> Tuple[Any, Any, Any]:
        """As ``label_smoothed_cross_entropy``, with the penalties added to the loss in training."""
        loss, sample_size, logging_output = super().forward(model, sample, reduce=reduce)
        if model.training:
            for name, weight, value in self.penalties(model):
                loss = loss + weight * value * sample_size
                logging_output[name] = value.detach() * sample_size
        return loss, sample_size, logging_output

    def penalties(self, model: nn.Module) -> List[Tuple[str, float, Tensor]]:
        """(name, weight, R) of each penalty whose weight is not zero, R a float32 scalar."""
        terms: List[Tuple[str, float, Tensor]] = []
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            if self.spectrum_weight:
                spectrum = [
                    spectrum_penalty(table.singular_values(), table.prior())
                    for table in svd_tables(model)
                ]
                terms.append(("spectrum", self.spectrum_weight, torch.stack(spectrum).sum()))
            if any(self.orthogonality_weights):
                defects = [
                    orthogonality_penalty(*table.grams(), self.orthogonality_weights)
                    for table in svd_tables(model)
                ]
                terms.append(("orthogonality", 1.0, torch.stack(defects).sum()))
        return terms

    @classmethod
    def reduce_metrics(cls, logging_outputs: List[Dict[str, Any]]) -> None:
        """fairseq's hook: the likelihood's metrics, then each penalty's R."""
        super().reduce_metrics(logging_outputs)
        sample_size = sum(log.get("sample_size", 0) for log in logging_outputs)
        for name in cls.PENALTIES:
            if any(name in log for log in logging_outputs):
                total = sum(log.get(name, 0) for log in logging_outputs)
                metrics.log_scalar(name, total / sample_size, sample_size, round=5)


def svd_tables(model: nn.Module) -> List[SVDEmbedding]:
    """The model's SVD tables, each once however often it is shared.

    Raises:
        ConfigurationError: there is none.
    """
    tables = [module for module in model.modules() if isinstance(module, SVDEmbedding)]
    if not tables:
        raise ConfigurationError(
            "a model with an SVD table for --spectrum-weight and --orthogonality-weights",
            f"none in {type(model).__name__}",
            "Use an arch such as transformer_sc, add --embedding-type svd, or set both weights "
            "to 0.",
        )
    return tables
