"""The same likelihood computed block by block, without holding tokens x words scores."""

from __future__ import annotations

import logging
from typing import Any, Tuple

import torch
from torch import Tensor, nn

from spectral_fairseq.errors import arguments_as_flags
from spectral_fairseq.functional.softmax_loss import blockwise_cross_entropy
from spectral_fairseq.heads.head import Head
from spectral_fairseq.plugin.likelihood.base import (
    FullScores,
    Likelihood,
    OutputLayer,
    check_output_layer,
    output_layer_replaced,
)
from spectral_fairseq.plugin.likelihood.form import LOSS_FORM
from spectral_fairseq.plugin.models.find import output_table, softmax_operands
from spectral_fairseq.plugin.penalties.view import Parts

logger = logging.getLogger(__name__)

# The arguments that an output layer's own loss may refuse.
HEAD_FLAGS = {"label_smoothing": "--label-smoothing", "cutoffs": "--adaptive-softmax-cutoff"}


class Blockwise(FullScores):
    """The loss of the output layer itself, taken where the scores would be made.

    Full scores are used where a caller asks for single tokens or for the accuracy, and for small
    batches where that is said to be faster.

    Args:
        criterion: the criterion that takes it.
        parts: of the model.
        dense_up_to: number of tokens up to which a batch is small.
    """

    def __init__(self, criterion: Any, parts: Parts, dense_up_to: float = 0) -> None:
        super().__init__(criterion, parts)
        self.dense_up_to = dense_up_to
        self._full_scores = criterion.report_accuracy

    def check(self) -> None:
        """See the base class.

        Raises:
            ConfigurationError: an output layer that cannot be replaced, or label smoothing where
                the output layer's own loss has none.
        """
        if isinstance(self.head, Head) and not self._full_scores:
            with arguments_as_flags(**HEAD_FLAGS):
                self.head.check_label_smoothing(self.criterion.eps)
        if not isinstance(self.head, Head):
            with arguments_as_flags(weight=LOSS_FORM.flag):
                output_table(self.decoder, self.words.rows)
        check_output_layer(self.decoder)
        if self._full_scores:
            logger.warning(
                "--report-accuracy makes the scores of all words, which the loss of this output "
                "layer would do without; drop it where they take too much memory"
            )

    def __call__(self, model: nn.Module, sample: Any, reduce: bool) -> Likelihood:
        """See the base class."""
        targets = sample["target"]
        small = targets.numel() <= self.dense_up_to
        if small or not reduce or self._full_scores:
            return super().__call__(model, sample, reduce)
        skip = self.criterion.ignore_prefix_size

        def loss_instead(_: OutputLayer) -> OutputLayer:
            def run(features: Tensor) -> Tensor:
                with arguments_as_flags(**HEAD_FLAGS):
                    pair = self._loss(
                        features[:, skip:],
                        targets[:, skip:],
                        self.criterion.eps,
                        self.criterion.padding_idx,
                    )
                return torch.stack(pair)

            return run

        with output_layer_replaced(self.decoder, loss_instead):
            net_output = model(**sample["net_input"])
        loss, nll = net_output[0]
        return Likelihood(loss, loss.detach(), nll.detach(), net_output)

    def _loss(
        self, features: Tensor, targets: Tensor, smoothing: float, ignore_index: int
    ) -> Tuple[Tensor, Tensor]:
        """(loss_sum, nll_sum) of features, shape (b, t, d), and targets, shape (b, t)."""
        if isinstance(self.head, Head):
            return self.head.loss(features, targets, smoothing, ignore_index)
        rows, matrix, bias = softmax_operands(
            self.decoder, features.flatten(0, -2), self.words.rows
        )
        return blockwise_cross_entropy(
            rows,
            targets.flatten(),
            matrix,
            bias,
            label_smoothing=smoothing,
            ignore_index=ignore_index,
        )
