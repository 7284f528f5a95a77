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
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import torch
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
    label_smoothed_nll_loss,
)
from fairseq.logging import metrics
from fairseq.models import FairseqMultiModel
from torch import Tensor, nn

from spectral_fairseq.errors import ConfigurationError, arguments_as_flags
from spectral_fairseq.functional.linalg.gram import gram
from spectral_fairseq.functional.linalg.row_norms import row_norms
from spectral_fairseq.functional.linalg.singular_values import singular_values_of_gram
from spectral_fairseq.functional.losses.adversarial import (
    adversarial_logits,
    adversarial_margin,
    unperturbed_nll,
)
from spectral_fairseq.functional.losses.blockwise import blockwise_cross_entropy, smoothing_weights
from spectral_fairseq.functional.measures.mean_cosine import mean_cosine
from spectral_fairseq.functional.measures.spectrum_measures import spectrum_measures
from spectral_fairseq.heads import SoftmaxHead
from spectral_fairseq.heads.base import Head
from spectral_fairseq.plugin.criterions.penalties import (
    ACTIVATION_PENALTIES,
    Penalties,
    PenaltyFlags,
    activation_penalties,
    checked_weight,
)
from spectral_fairseq.plugin.models.output_table import (
    decoder_of,
    factored_table,
    output_layer_replaced,
    output_table,
)


class Likelihood(NamedTuple):
    """What the model makes of a batch, before any penalty.

    Args:
        loss: to be differentiated; a scalar if reduced.
        logged_loss: what the logs show for it.
        logged_nll: the negative log-likelihood, without label smoothing.
        net_output: of the model; its first entry need not be scores.
    """

    loss: Tensor
    logged_loss: Tensor
    logged_nll: Tensor
    net_output: Any


# How many workers measured their table, which is the same one, so that sums can be divided.
TABLES = "tables_measured"


@dataclass
class PenalisedCriterionConfig(PenaltyFlags, LabelSmoothedCrossEntropyCriterionConfig):
    """The flags of ``label_smoothed_cross_entropy``, and a weight for each penalty."""

    blockwise_loss: bool = field(
        default=False,
        metadata={
            "help": "in training compute a softmax's loss block by block, without holding tokens "
            "x words; equal up to rounding. Mixtures always do"
        },
    )
    log_spectrum_interval: int = field(
        default=0,
        metadata={
            "help": "log measures of the output table's spectrum in validation, whenever that many "
            "updates have passed since the last time; 0 for never"
        },
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
        # Here, and not only where a block of scores is smoothed: the host smooths with any number.
        with arguments_as_flags(label_smoothing="--label-smoothing"):
            smoothing_weights(cfg.label_smoothing, vocabulary=2)
        self.penalties = Penalties(cfg, task.target_dictionary)
        self.adversarial_epsilon = checked_weight("--adversarial-epsilon", cfg.adversarial_epsilon)
        self.blockwise_loss = cfg.blockwise_loss
        self.log_spectrum_interval = checked_weight(
            "--log-spectrum-interval", cfg.log_spectrum_interval
        )
        self._measured_at = -math.inf

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> "PenalisedCrossEntropy":
        """fairseq's hook."""
        return cls(cfg, task)

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that has not what the flags need, before training starts.

        Raises:
            ConfigurationError: no table for a penalty, no output layer that can be replaced, or
                label smoothing where the output layer's own loss has none.
        """
        for one in model.models.values() if isinstance(model, FairseqMultiModel) else (model,):
            self.penalties.check(one)
        head = self._blockwise_head(model)
        if isinstance(head, Head) and not self.report_accuracy:  # which takes the full scores
            head.check_label_smoothing(self.eps)
        if self.adversarial_epsilon or head is not None:
            with output_layer_replaced(model, lambda output_layer: output_layer):
                pass

    def forward(self, model: nn.Module, sample: Any, reduce: bool = True) -> Tuple[Any, Any, Any]:
        """As ``label_smoothed_cross_entropy``, with the penalties added to the loss in training."""
        head = getattr(decoder_of(model), "output_projection", None)
        if not model.training and not getattr(head, "own_loss_in_evaluation", False):
            loss, sample_size, logging_output = super().forward(model, sample, reduce=reduce)
            logging_output.update(self._spectrum_of(model))
            return loss, sample_size, logging_output
        likelihood = self._likelihood(model, sample, reduce)
        loss = likelihood.loss
        sample_size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        logging_output = {
            "loss": likelihood.logged_loss,
            "nll_loss": likelihood.logged_nll,
            "ntokens": sample["ntokens"],
            "nsentences": sample["target"].size(0),
            "sample_size": sample_size,
        }
        if self.report_accuracy:
            n_correct, total = self.compute_accuracy(model, likelihood.net_output, sample)
            logging_output["n_correct"], logging_output["total"] = int(n_correct), int(total)
        if not model.training:
            logging_output.update(self._spectrum_of(model))
            return loss, sample_size, logging_output
        for penalty in self.penalties(model) + activation_penalties(likelihood.net_output):
            # See Note [The scale of a penalty].
            loss = loss + penalty.weight * penalty.value * sample_size
            logging_output[penalty.name] = penalty.value.detach() * sample_size
            logging_output[f"{penalty.name}_size"] = sample_size
        for penalty in self.penalties.last(model):
            if penalty.name not in logging_output:  # not due: shown, but no part of averages
                logging_output[penalty.name] = penalty.value * sample_size
                logging_output[f"{penalty.name}_size"] = 0
        return loss, sample_size, logging_output

    def _likelihood(self, model: nn.Module, sample: Any, reduce: bool) -> "Likelihood":
        blockwise_head = self._blockwise_head(model)
        if self.adversarial_epsilon:
            return self._adversarial(model, sample, reduce)
        if blockwise_head is not None and reduce and not self.report_accuracy:
            return self._blockwise(model, sample, blockwise_head)
        net_output = model(**sample["net_input"])
        loss, nll = self.compute_loss(model, net_output, sample, reduce=reduce)
        return Likelihood(loss, loss.detach(), nll.detach(), net_output)

    @torch.no_grad()
    def _spectrum_of(self, model: nn.Module) -> Dict[str, float]:
        """Measures of the output table if they are due; once in a validation."""
        now = getattr(model, "num_updates", 0)
        if not self.log_spectrum_interval or now - self._measured_at < self.log_spectrum_interval:
            return {}
        self._measured_at = now
        weight, excluded = self.penalties.output_table(model)
        sigma = singular_values_of_gram(gram(weight, excluded), weight.size(0) - excluded.numel())
        measures = {
            "mean_cosine": mean_cosine(weight, excluded),
            **spectrum_measures(sigma),
        }
        return {**{f"table_{name}": value for name, value in measures.items()}, TABLES: 1}

    def _blockwise_head(self, model: nn.Module) -> Any:
        """The head whose own loss is to be taken, or ``None`` for that of the full scores."""
        head = getattr(decoder_of(model), "output_projection", None)
        if getattr(head, "own_loss", False):
            if self.adversarial_epsilon:
                raise ConfigurationError(
                    "a single softmax for --adversarial-epsilon",
                    f"{type(head).__name__}, which has no one logit for a target",
                    "Use --output-head softmax (of a Transformer-XL with "
                    "--adaptive-softmax-cutoff ''), or drop --adversarial-epsilon.",
                )
            return head
        if not self.blockwise_loss:
            return None
        return head if isinstance(head, SoftmaxHead) else self._softmax_of_the_host(model)

    def _softmax_of_the_host(self, model: nn.Module) -> Any:
        weight = output_table(model, self.penalties.words(model).rows)
        layer = getattr(decoder_of(model), "output_projection", None)
        if getattr(layer, "bias", None) is not None:
            raise ConfigurationError(
                "an output layer without bias for --blockwise-loss",
                f"a bias in {type(layer).__name__}",
                "Drop --blockwise-loss.",
            )

        def loss(features: Tensor, targets: Tensor, eps: float, ignore_index: int) -> Any:
            return blockwise_cross_entropy(
                features.flatten(0, -2),
                targets.flatten(),
                weight,
                label_smoothing=eps,
                ignore_index=ignore_index,
            )

        return SimpleNamespace(loss=loss)

    def _blockwise(self, model: nn.Module, sample: Any, head: Any) -> "Likelihood":
        """The same likelihood from the head's own loss, taken where the scores would be made."""
        target = sample["target"]

        def loss_instead(output_layer: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def run(features: Tensor) -> Tensor:
                skip = self.ignore_prefix_size
                pair = head.loss(features[:, skip:], target[:, skip:], self.eps, self.padding_idx)
                return torch.stack(pair)

            return run

        with output_layer_replaced(model, loss_instead):
            net_output = model(**sample["net_input"])
        loss, nll = net_output[0]
        return Likelihood(loss, loss.detach(), nll.detach(), net_output)

    def _adversarial(self, model: nn.Module, sample: Any, reduce: bool) -> "Likelihood":
        """The likelihood under the worst target vectors; the logs keep the plain one."""
        target = sample["target"]
        margins: List[Tensor] = []

        def against(output_layer: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def perturbed(features: Tensor) -> Tensor:
                table = factored_table(model)
                if table is not None:
                    vectors = table(target)  # [b, t, d]
                else:
                    vectors = output_table(model, self.penalties.words(model).rows)[target]
                margin = adversarial_margin(
                    features, row_norms(vectors), target, self.adversarial_epsilon, self.padding_idx
                )
                margins.append(margin.detach())
                return adversarial_logits(output_layer(features), target, margin, inplace=True)

            return perturbed

        with output_layer_replaced(model, against):
            net_output = model(**sample["net_input"])
        (margin,) = margins
        lprobs, targets = self.get_lprobs_and_target(model, net_output, sample)
        loss, nll = label_smoothed_nll_loss(
            lprobs, targets, self.eps, ignore_index=self.padding_idx, reduce=False
        )  # [b * t, 1] each
        plain_loss, plain_nll = self._without_margin(
            loss.detach(),
            nll.detach(),
            margin[:, self.ignore_prefix_size :].reshape(-1, 1),
            vocabulary=lprobs.size(-1),
        )
        if reduce:
            loss, plain_loss, plain_nll = loss.sum(), plain_loss.sum(), plain_nll.sum()
        if self.report_accuracy:
            logits = adversarial_logits(net_output[0].detach(), target, -margin)
            net_output = (logits, *net_output[1:])
        return Likelihood(loss, plain_loss, plain_nll, net_output)

    def _without_margin(
        self, loss: Tensor, nll: Tensor, margin: Tensor, vocabulary: int
    ) -> Tuple[Tensor, Tensor]:
        """Loss and NLL of each token without the adversary; all of shape [tokens, 1].

        With the target's logit raised again by its margin m every log-probability falls by
        c = nll_plain - nll + m, and the target's rises by m. Padding has no margin and no loss, so
        that nothing is added to it.
        """
        plain = unperturbed_nll(nll, margin)
        fall = plain - nll + margin
        eps_i = self.eps / (vocabulary - 1)
        smooth_change = vocabulary * fall - margin
        return loss + (1 - self.eps - eps_i) * (plain - nll) + eps_i * smooth_change, plain

    @classmethod
    def reduce_metrics(cls, logging_outputs: List[Dict[str, Any]]) -> None:
        """fairseq's hook: the likelihood's metrics, then each penalty's R."""
        super().reduce_metrics(logging_outputs)
        for name in (*Penalties.NAMES, *ACTIVATION_PENALTIES):
            logs = [log for log in logging_outputs if name in log]
            shown = sum(log["sample_size"] for log in logs)
            if shown > 0:
                total = sum(log[name] for log in logs)
                due = sum(log[f"{name}_size"] for log in logs)
                metrics.log_scalar(name, total / shown, due, round=5)
        measured = sum(log.get(TABLES, 0) for log in logging_outputs)
        if measured:
            keys = {key for log in logging_outputs for key in log if key.startswith("table_")}
            for key in sorted(keys):
                total = sum(log.get(key, 0) for log in logging_outputs)
                metrics.log_scalar(key, total / measured, round=5)
