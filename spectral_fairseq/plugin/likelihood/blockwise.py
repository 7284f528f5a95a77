"""The same likelihood computed block by block, without holding tokens x words scores."""

from __future__ import annotations

import logging
from typing import Any, Callable, Tuple

import torch
from torch import Tensor, nn

from spectral_fairseq.errors import arguments_as_flags
from spectral_fairseq.functional.softmax_loss import blockwise_cross_entropy
from spectral_fairseq.heads import SoftmaxHead
from spectral_fairseq.heads.head import Head
from spectral_fairseq.plugin.likelihood.base import (
    FullScores,
    Likelihood,
    OutputLayer,
    check_output_layer,
    output_layer_replaced,
)
from spectral_fairseq.plugin.likelihood.form import LOSS_FORM
from spectral_fairseq.plugin.models.find import head_of, output_table, softmax_operands

logger = logging.getLogger(__name__)

# The arguments that an output layer's own loss may refuse.
HEAD_FLAGS = {"label_smoothing": "--label-smoothing", "cutoffs": "--adaptive-softmax-cutoff"}

HeadLoss = Callable[[Tensor, Tensor, float, int], Tuple[Tensor, Tensor]]
"""(features, targets, label smoothing, padding index) -> (loss_sum, nll_sum)."""


class Blockwise(FullScores):
    """The loss of the output layer itself, taken where the scores would be made.

    Full scores are used where a caller asks for single tokens or for the accuracy, and for small
    batches where that is said to be faster.

    Args:
        criterion: the criterion that takes it.
        dense_up_to: number of tokens up to which a batch is small.
    """

    def __init__(self, criterion: Any, dense_up_to: float = 0) -> None:
        super().__init__(criterion)
        self.dense_up_to = dense_up_to

    def check(self, model: nn.Module) -> None:
        """See the base class.

        Raises:
            ConfigurationError: an output layer that cannot be replaced, or label smoothing where
                the output layer's own loss has none.
        """
        head = head_of(model)
        if isinstance(head, Head) and not self.criterion.report_accuracy:
            with arguments_as_flags(**HEAD_FLAGS):
                head.check_label_smoothing(self.criterion.eps)
        self._loss_of(model)
        check_output_layer(model)
        if self.criterion.report_accuracy:
            logger.warning(
                "--report-accuracy makes the scores of all words, which the loss of this output "
                "layer would do without; drop it where they take too much memory"
            )

    def __call__(self, model: nn.Module, sample: Any, reduce: bool) -> Likelihood:
        """See the base class."""
        targets = sample["target"]
        small = targets.numel() <= self.dense_up_to
        if small or not reduce or self.criterion.report_accuracy:
            return super().__call__(model, sample, reduce)
        head_loss = self._loss_of(model)
        skip = self.criterion.ignore_prefix_size

        def loss_instead(_: OutputLayer) -> OutputLayer:
            def run(features: Tensor) -> Tensor:
                with arguments_as_flags(**HEAD_FLAGS):
                    pair = head_loss(
                        features[:, skip:],
                        targets[:, skip:],
                        self.criterion.eps,
                        self.criterion.padding_idx,
                    )
                return torch.stack(pair)

            return run

        with output_layer_replaced(model, loss_instead):
            net_output = model(**sample["net_input"])
        loss, nll = net_output[0]
        return Likelihood(loss, loss.detach(), nll.detach(), net_output)

    def _loss_of(self, model: nn.Module) -> HeadLoss:
        head = head_of(model)
        if getattr(head, "own_loss", False) or isinstance(head, SoftmaxHead):
            return head.loss
        num_words = self.criterion.penalties.view(model).words.rows
        with arguments_as_flags(weight=LOSS_FORM.flag):
            output_table(model, num_words)

        def loss(features: Tensor, targets: Tensor, eps: float, ignore_index: int) -> Any:
            rows, matrix, bias = softmax_operands(model, features.flatten(0, -2), num_words)
            return blockwise_cross_entropy(
                rows,
                targets.flatten(),
                matrix,
                bias,
                label_smoothing=eps,
                ignore_index=ignore_index,
            )

        return loss
