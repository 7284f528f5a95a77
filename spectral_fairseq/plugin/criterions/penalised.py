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
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Tuple

import torch
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
    label_smoothed_nll_loss,
)
from fairseq.logging import metrics
from torch import Tensor, nn

from spectral_fairseq.functional.adversarial import (
    adversarial_logits,
    adversarial_margin,
    unperturbed_nll,
)
from spectral_fairseq.functional.weight_norm import row_norms
from spectral_fairseq.plugin.criterions.penalties import (
    Penalties,
    PenaltyFlags,
    checked_weight,
)
from spectral_fairseq.plugin.output_table import (
    factored_table,
    output_layer_replaced,
    output_table,
)


@dataclass
class PenalisedCriterionConfig(PenaltyFlags, LabelSmoothedCrossEntropyCriterionConfig):
    """The flags of ``label_smoothed_cross_entropy``, and a weight for each penalty."""


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
        self.penalties = Penalties(cfg, task.target_dictionary)
        self.adversarial_epsilon = checked_weight("--adversarial-epsilon", cfg.adversarial_epsilon)

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> "PenalisedCrossEntropy":
        """fairseq's hook."""
        return cls(cfg, task)

    def forward(self, model: nn.Module, sample: Any, reduce: bool = True) -> Tuple[Any, Any, Any]:
        """As ``label_smoothed_cross_entropy``, with the penalties added to the loss in training."""
        if not model.training:
            return super().forward(model, sample, reduce=reduce)
        if self.adversarial_epsilon:
            loss, sample_size, logging_output = self._adversarial(model, sample, reduce)
        else:
            loss, sample_size, logging_output = super().forward(model, sample, reduce=reduce)
        for penalty in self.penalties(model):
            # See Note [The scale of a penalty].
            loss = loss + penalty.weight * penalty.value * sample_size
            # Not every penalty is there at every update: its own sum of sizes goes along.
            logging_output[penalty.name] = penalty.value.detach() * sample_size
            logging_output[f"{penalty.name}_size"] = sample_size
        return loss, sample_size, logging_output

    def _adversarial(
        self, model: nn.Module, sample: Any, reduce: bool
    ) -> Tuple[Tensor, Any, Dict[str, Any]]:
        """The likelihood under the worst target vectors; the logs keep the plain one."""
        target = sample["target"]
        margins: List[Tensor] = []

        def against(output_layer: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def perturbed(features: Tensor) -> Tensor:
                table = factored_table(model)
                if table is not None:
                    vectors = table(target)  # [b, t, d]
                else:
                    vectors = output_table(model, self.penalties.num_words)[target]
                margin = adversarial_margin(
                    features, row_norms(vectors), target, self.adversarial_epsilon, self.padding_idx
                )
                margins.append(margin.detach())
                return adversarial_logits(output_layer(features), target, margin)

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
        sample_size = target.size(0) if self.sentence_avg else sample["ntokens"]
        logging_output = {
            "loss": plain_loss.sum() if reduce else plain_loss,
            "nll_loss": plain_nll.sum() if reduce else plain_nll,
            "ntokens": sample["ntokens"],
            "nsentences": target.size(0),
            "sample_size": sample_size,
        }
        if self.report_accuracy:
            logits = adversarial_logits(net_output[0].detach(), target, -margin)
            n_correct, total = self.compute_accuracy(model, (logits, *net_output[1:]), sample)
            logging_output["n_correct"], logging_output["total"] = int(n_correct), int(total)
        return loss.sum() if reduce else loss, sample_size, logging_output

    def _without_margin(
        self, loss: Tensor, nll: Tensor, margin: Tensor, vocabulary: int
    ) -> Tuple[Tensor, Tensor]:
        """Loss and NLL of each token without the adversary; all of shape [tokens, 1].

        With the target's logit raised again by its margin m every log-probability falls by
        c = nll_plain - nll + m, and the target's rises by m. Padding has no margin and no loss.
        """
        counted = nll.ne(0)
        plain = unperturbed_nll(nll, margin).where(counted, nll)
        fall = (plain - nll + margin).where(counted, torch.zeros_like(nll))
        eps_i = self.eps / (vocabulary - 1)
        smooth_change = vocabulary * fall - margin.where(counted, torch.zeros_like(margin))
        return loss + (1 - self.eps - eps_i) * (plain - nll) + eps_i * smooth_change, plain

    @classmethod
    def reduce_metrics(cls, logging_outputs: List[Dict[str, Any]]) -> None:
        """fairseq's hook: the likelihood's metrics, then each penalty's R."""
        super().reduce_metrics(logging_outputs)
        for name in Penalties.NAMES:
            size = sum(log.get(f"{name}_size", 0) for log in logging_outputs)
            if size > 0:
                total = sum(log.get(name, 0) for log in logging_outputs)
                metrics.log_scalar(name, total / size, size, round=5)
