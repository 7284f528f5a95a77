"""The likelihood under the worst target vectors nearby: Wang, Gong, Liu, ICML 2019.

"Improving Neural Language Modeling via Adversarial Training", https://arxiv.org/abs/1906.03805
"""

from __future__ import annotations

from typing import Any, List, Union

from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from torch import Tensor, nn

from spectral_fairseq.embeddings import Table
from spectral_fairseq.errors import ConfigurationError, arguments_as_flags
from spectral_fairseq.functional.products import row_norms
from spectral_fairseq.functional.softmax_loss import (
    adversarial_logits,
    adversarial_margin,
    smoothing_weights,
    unperturbed_loss,
)
from spectral_fairseq.heads.head import Head
from spectral_fairseq.plugin.criterions.likelihood.base import Likelihood, LikelihoodTerm
from spectral_fairseq.plugin.criterions.likelihood.output_layer import (
    OutputLayer,
    check_output_layer,
    output_layer_replaced,
)
from spectral_fairseq.plugin.flags import weight_flag
from spectral_fairseq.plugin.models.output_table import (
    head_of,
    output_table,
    table_module,
)

ADVERSARIAL_EPSILON = weight_flag(
    "adversarial_epsilon", "in training a target's logit loses epsilon ||w_y|| ||h||"
)


class Adversarial(LikelihoodTerm):
    """Trains on lowered target logits; the logs keep the likelihood of the plain ones.

    Args:
        criterion: the criterion that takes it.
        epsilon: radius of the perturbation as a share of ||w_y||.
    """

    def __init__(self, criterion: Any, epsilon: float) -> None:
        super().__init__(criterion)
        self.epsilon = epsilon

    def check(self, model: nn.Module) -> None:
        """See the base class.

        Raises:
            ConfigurationError: an adaptive softmax, a sigsoftmax, or an output layer that cannot be
                replaced.
        """
        head = head_of(model)
        if isinstance(head, Head) and not head.adversarial:
            raise ConfigurationError(
                "a softmax or a mixture for --adversarial-epsilon",
                f"{type(head).__name__}, in which a target's score is no single logit w'h + b",
                "Use another --output-head, of a Transformer-XL --adaptive-softmax-cutoff ''; or "
                "drop --adversarial-epsilon.",
            )
        check_output_layer(model)
        self._table(model)

    def __call__(self, model: nn.Module, sample: Any, reduce: bool) -> Likelihood:
        """See the base class."""
        self.check(model)
        criterion = self.criterion
        target = sample["target"]
        margins: List[Tensor] = []

        def perturb(output_layer: OutputLayer) -> OutputLayer:
            def perturbed(features: Tensor) -> Tensor:
                margin = adversarial_margin(
                    features,
                    row_norms(self._vectors(model, target)),
                    target,
                    self.epsilon,
                    criterion.padding_idx,
                )
                margins.append(margin.detach())
                return adversarial_logits(output_layer(features), target, margin, inplace=True)

            return perturbed

        with output_layer_replaced(model, perturb):
            net_output = model(**sample["net_input"])
        (margin,) = margins
        lprobs, targets = criterion.get_lprobs_and_target(model, net_output, sample)
        loss, nll = label_smoothed_nll_loss(
            lprobs, targets, criterion.eps, ignore_index=criterion.padding_idx, reduce=False
        )  # [b * t, 1] each
        # Padding has neither margin nor loss, so nothing is added to it.
        plain_loss, plain_nll = unperturbed_loss(
            loss,
            nll,
            margin[:, criterion.ignore_prefix_size :].reshape(-1, 1),
            smoothing_weights(criterion.eps, lprobs.size(-1)),
            lprobs.size(-1),
        )
        if reduce:
            loss, plain_loss, plain_nll = loss.sum(), plain_loss.sum(), plain_nll.sum()
        if criterion.report_accuracy:
            logits = adversarial_logits(net_output[0].detach(), target, -margin)
            net_output = (logits, *net_output[1:])
        return Likelihood(loss, plain_loss, plain_nll, net_output)

    def _vectors(self, model: nn.Module, target: Tensor) -> Tensor:
        """The vectors w_y of the targets, shape (b, t, d)."""
        table = self._table(model)
        return table.vectors(target) if isinstance(table, Table) else table[target]

    def _table(self, model: nn.Module) -> Union[Table, Tensor]:
        """The output table: the module, or fairseq's matrix."""
        table = table_module(model)
        if table is not None:
            return table
        with arguments_as_flags(weight=ADVERSARIAL_EPSILON.option):
            return output_table(model, self.criterion.penalties.view(model).words.rows)
