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
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

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
    orthogonality_interval: str = field(
        default="auto",
        metadata={
            "help": "compute the orthogonality terms every k-th update, k times as strong; 'auto' "
            "is 1 up to 32,768 words and grows with the dictionary"
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
            f"{flag} to be four numbers separated by commas, l1,l2,l3,l4",
            repr(text),
            "For example: --orthogonality-weights 0.01,0.01,0,0.",
        ) from None
    for weight in (l1, l2, l3, l4):
        checked_weight(flag, weight)
    return l1, l2, l3, l4


def parse_interval(text: str) -> Optional[int]:
    """``--orthogonality-interval`` as a number of updates, ``None`` for ``auto``.

    Raises:
        ConfigurationError: neither ``auto`` nor a whole number from 1.
    """
    if text == "auto":
        return None
    if not str(text).isdigit() or int(text) < 1:
        raise ConfigurationError(
            "--orthogonality-interval to be 'auto' or a whole number >= 1",
            repr(text),
            "Correct it.",
        )
    return int(text)


# Note [Lazy orthogonality]
# -------------------------
# U'U costs N d^2, forward and again backward, which no batch size amortises: at N = 267,735 and
# d = 410 about a quarter of the softmax of 1,024 tokens. U moves by far less than its own size in
# a few updates, so for large N the terms are computed every k-th update with k times their
# weight: the gradient summed over k updates stays the same to first order.
WORDS_PER_INTERVAL_STEP = 32768


def interval_for(num_words: int) -> int:
    """The automatic ``--orthogonality-interval`` for a dictionary of ``num_words``."""
    return max(1, num_words // WORDS_PER_INTERVAL_STEP)


class Penalty(NamedTuple):
    """One term of the objective: weight times value, value a float32 scalar."""

    name: str
    weight: float
    value: Tensor


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
        self.orthogonality_interval = parse_interval(cfg.orthogonality_interval)

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> "PenalisedCrossEntropy":
        """fairseq's hook."""
        return cls(cfg, task)

    def forward(self, model: nn.Module, sample: Any, reduce: bool = True) -> Tuple[Any, Any, Any]:
        """As ``label_smoothed_cross_entropy``, with the penalties added to the loss in training."""
        loss, sample_size, logging_output = super().forward(model, sample, reduce=reduce)
        if model.training:
            for penalty in self.penalties(model):
                loss = loss + penalty.weight * penalty.value * sample_size
                # Not every penalty is there at every update: its own sum of sizes goes along.
                logging_output[penalty.name] = penalty.value.detach() * sample_size
                logging_output[f"{penalty.name}_size"] = sample_size
        return loss, sample_size, logging_output

    def penalties(self, model: nn.Module) -> List[Penalty]:
        """The penalties due at this update whose weight is not zero."""
        due: List[Penalty] = []
        if not (self.spectrum_weight or any(self.orthogonality_weights)):
            return due
        tables = svd_tables(model)
        with torch.autocast(tables[0].U.device.type, enabled=False):
            if self.spectrum_weight:
                terms = [spectrum_penalty(t.singular_values(), t.prior()) for t in tables]
                due.append(Penalty("spectrum", self.spectrum_weight, torch.stack(terms).sum()))
            # See Note [Lazy orthogonality].
            interval = self.orthogonality_interval or interval_for(
                max(table.num_embeddings for table in tables)
            )
            if any(self.orthogonality_weights) and tables[0].num_updates % interval == 0:
                terms = [
                    orthogonality_penalty(*table.grams(), self.orthogonality_weights)
                    for table in tables
                ]
                due.append(Penalty("orthogonality", float(interval), torch.stack(terms).sum()))
        return due

    @classmethod
    def reduce_metrics(cls, logging_outputs: List[Dict[str, Any]]) -> None:
        """fairseq's hook: the likelihood's metrics, then each penalty's R."""
        super().reduce_metrics(logging_outputs)
        for name in cls.PENALTIES:
            size = sum(log.get(f"{name}_size", 0) for log in logging_outputs)
            if size > 0:
                total = sum(log.get(name, 0) for log in logging_outputs)
                metrics.log_scalar(name, total / size, size, round=5)


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
