"""The adversarial likelihood computed block by block, of a softmax or of each expert of a mixture.

The method is that of ``adversarial.py``. The target's logit is lowered in each expert of a mixture,
as the public code of the method's authors does with a mixture of softmaxes.
"""

from __future__ import annotations

from typing import Any, List

import torch
from torch import Tensor, nn

from spectral_fairseq.errors import UnsupportedError
from spectral_fairseq.functional.products import row_norms
from spectral_fairseq.functional.softmax_loss import (
    AdversarialLoss,
    adversarial_blockwise_cross_entropy,
    adversarial_margin,
)
from spectral_fairseq.heads.head import Head
from spectral_fairseq.plugin.criterions.likelihood.adversarial import Adversarial
from spectral_fairseq.plugin.criterions.likelihood.base import Likelihood
from spectral_fairseq.plugin.criterions.likelihood.output_layer import (
    OutputLayer,
    output_layer_replaced,
)
from spectral_fairseq.plugin.models.output_table import head_of, softmax_operands


class AdversarialBlocks(Adversarial):
    """Trains on lowered target logits without holding tokens x words scores.

    Full scores are used where a caller asks for single tokens or for the accuracy of a softmax. The
    accuracy of a mixture is that of a second dropout mask on its contexts.
    """

    def __call__(self, model: nn.Module, sample: Any, reduce: bool) -> Likelihood:
        """See the base class.

        Raises:
            UnsupportedError: the losses of single tokens of a mixture.
        """
        self.check(model)
        own_loss = getattr(head_of(model), "own_loss", False)
        if not own_loss and (not reduce or self.criterion.report_accuracy):
            return super().__call__(model, sample, reduce)
        if not reduce:
            raise UnsupportedError(
                "a loss summed over tokens with --adversarial-epsilon and a mixture",
                "reduce=False",
                "Use --output-head softmax.",
            )
        skip = self.criterion.ignore_prefix_size
        targets = sample["target"][:, skip:]
        losses: List[AdversarialLoss] = []
        scores: List[Tensor] = []

        def loss_instead(output_layer: OutputLayer) -> OutputLayer:
            def run(features: Tensor) -> Tensor:
                losses.append(self._loss(model, features[:, skip:], targets))
                if self.criterion.report_accuracy:
                    # A report must not shift the masks of what is trained after it.
                    devices = [features.device] if features.is_cuda else []
                    with torch.no_grad(), torch.random.fork_rng(devices):
                        scores.append(output_layer(features))
                return losses[0].loss  # data-parallel wrappers look for its graph in the output

            return run

        with output_layer_replaced(model, loss_instead):
            net_output = model(**sample["net_input"])
        return Likelihood(*losses[0], (*scores, *net_output[len(scores) :]))

    def _loss(self, model: nn.Module, features: Tensor, targets: Tensor) -> AdversarialLoss:
        head = head_of(model)
        smoothing, padding_idx = self.criterion.eps, self.criterion.padding_idx
        if isinstance(head, Head):
            return head.adversarial_loss(features, targets, self.epsilon, smoothing, padding_idx)
        features, targets = features.flatten(0, -2), targets.flatten()
        num_words = self.criterion.penalties.view(model).words.rows
        norms = row_norms(self._vectors(model, targets))
        rows, matrix, bias = softmax_operands(model, features, num_words)
        return adversarial_blockwise_cross_entropy(
            rows,
            targets,
            matrix,
            adversarial_margin(features, norms, targets, self.epsilon),
            bias,
            label_smoothing=smoothing,
            ignore_index=padding_idx,
        )
