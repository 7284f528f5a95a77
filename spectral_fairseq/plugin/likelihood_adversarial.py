"""The likelihood of the adversarial softmax, in which the target's logit loses a margin.

The formula is in ``functional/softmax_loss.py``.
"""

from __future__ import annotations

from typing import Any, List, Union

import torch
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from torch import Tensor, nn

from spectral_fairseq import refusals
from spectral_fairseq.embeddings import Table
from spectral_fairseq.errors import UnsupportedError, arguments_as_flags
from spectral_fairseq.functional.blocks import smoothing_weights
from spectral_fairseq.functional.row_norms import row_norms
from spectral_fairseq.functional.softmax_loss import (
    Losses,
    adversarial_logits,
    adversarial_margin,
    unperturbed_loss,
)
from spectral_fairseq.heads.head import Head
from spectral_fairseq.plugin.find import check_output_layer, output_matrix, table_module
from spectral_fairseq.plugin.likelihood import ADVERSARIAL_EPSILON, Likelihood, LikelihoodTerm
from spectral_fairseq.plugin.objective import Parts


class Adversarial(LikelihoodTerm):
    """Trains on lowered target logits; the logs keep the likelihood of the plain ones.

    Args:
        epsilon: radius of the perturbation as a share of ||w_y||.

    Raises:
        ConfigurationError: an adaptive softmax, or a mixture without its blockwise
            loss.
    """

    blockwise = False

    def __init__(self, criterion: Any, parts: Parts, epsilon: float) -> None:
        super().__init__(criterion, parts)
        self.epsilon = epsilon
        head = self.head
        if self.own_loss and head.adversarial and not self.blockwise:
            raise refusals.DENSE_MIXTURE.error("--loss-form dense")
        if isinstance(head, Head) and not head.adversarial:
            kind = type(head).__name__
            kind = kind if head.softcap is None else f"{kind} with --logit-softcap"
            raise refusals.ADVERSARIAL.error(
                f"{kind}, in which a target's score is no single logit w'h + b"
            )

    def check(self) -> None:
        """See the base class."""
        check_output_layer(self.decoder)
        self._table()

    def __call__(self, model: nn.Module, sample: Any, reduce: bool) -> Likelihood:
        """See the base class."""
        criterion = self.criterion
        target = sample["target"]
        margins: List[Tensor] = []
        output_layer: Any = self.decoder.output_layer

        def perturbed(features: Tensor) -> Tensor:
            norms = row_norms(self._vectors(target))
            padding = criterion.padding_idx
            margin = adversarial_margin(features, norms, target, self.epsilon, padding)
            margins.append(margin.detach())
            return adversarial_logits(output_layer(features), target, margin, inplace=True)

        with self.output_layer_replaced(perturbed):
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

    def _vectors(self, target: Tensor) -> Tensor:
        """The vectors w_y of the targets, shape (b, t, d)."""
        table = self._table()
        return table.vectors(target) if isinstance(table, Table) else table[target]

    def _table(self) -> Union[Table, Tensor]:
        """The output table: the module, or fairseq's matrix."""
        table = table_module(self.decoder)
        if table is not None:
            return table
        with arguments_as_flags(weight=ADVERSARIAL_EPSILON.flag):
            return output_matrix(self.decoder, self.words.rows)


# The adversarial likelihood computed block by block, of a softmax or of each expert of a mixture.
#
# The method is that of :class:`Adversarial`. The target's logit is lowered in each expert of a
# mixture, as the public code of the method's authors does with a mixture of softmaxes.


class AdversarialBlocks(Adversarial):
    """Trains on lowered target logits without holding tokens x words scores.

    Full scores are used where a caller asks for single tokens or for the accuracy of a softmax. The
    accuracy of a mixture is that of a second dropout mask on its contexts. Small batches of a
    softmax, of up to ``dense_up_to`` tokens, take full scores too.
    """

    blockwise = True

    def __init__(
        self, criterion: Any, parts: Parts, epsilon: float, dense_up_to: float = 0
    ) -> None:
        super().__init__(criterion, parts, epsilon)
        self.dense_up_to = dense_up_to

    def __call__(self, model: nn.Module, sample: Any, reduce: bool) -> Likelihood:
        """See the base class.

        Raises:
            UnsupportedError: the losses of single tokens of a mixture.
        """
        own_loss = self.own_loss
        small = sample["target"].numel() <= self.dense_up_to
        if not own_loss and (small or not reduce or self.criterion.report_accuracy):
            return super().__call__(model, sample, reduce)
        if not reduce:
            raise UnsupportedError(
                "a loss summed over tokens with --adversarial-epsilon and a mixture",
                "reduce=False",
                "Use --output-head softmax.",
            )
        skip = self.criterion.ignore_prefix_size
        targets = sample["target"][:, skip:]
        losses: List[Losses] = []
        scores: List[Tensor] = []
        output_layer: Any = self.decoder.output_layer

        def loss_instead(features: Tensor) -> Tensor:
            losses.append(self.block_losses(features[:, skip:], targets, epsilon=self.epsilon))
            if self.criterion.report_accuracy:
                # A report must not shift the masks of what is trained after it.
                devices = [features.device] if features.is_cuda else []
                with torch.no_grad(), torch.random.fork_rng(devices):
                    scores.append(output_layer(features))
            return losses[0].loss  # data-parallel wrappers look for its graph in the output

        with self.output_layer_replaced(loss_instead):
            net_output = model(**sample["net_input"])
        loss, plain_loss, nll, _ = losses[0]
        return Likelihood(loss, plain_loss, nll, (*scores, *net_output[len(scores) :]))
