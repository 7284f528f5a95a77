"""The likelihood of the adversarial softmax, in which the target's logit loses a margin.

The formula is in ``functional/adversarial_softmax.py``. In a mixture the logit is lowered in each
expert, as the public code of the method's authors does with a mixture of softmaxes.
"""

from __future__ import annotations

from typing import Any, List

import torch
from torch import Tensor, nn

from spectral_fairseq import refusals
from spectral_fairseq.errors import UnsupportedError
from spectral_fairseq.functional.softmax_loss import Losses
from spectral_fairseq.heads.head import Head
from spectral_fairseq.plugin.likelihood import ADVERSARIAL_EPSILON, Likelihood, LikelihoodTerm
from spectral_fairseq.plugin.objective import Parts


class Adversarial(LikelihoodTerm):
    """Trains on lowered target logits by blocks of scores; the logs keep the plain likelihood.

    The accuracy of a mixture is that of a second dropout mask on its contexts.

    Args:
        epsilon: radius of the perturbation as a share of ||w_y||.

    Raises:
        UnsupportedError: an output layer in which a target's score is no single logit.
    """

    flag = ADVERSARIAL_EPSILON.flag
    makes_scores = True

    def __init__(self, criterion: Any, parts: Parts, epsilon: float) -> None:
        super().__init__(criterion, parts)
        self.epsilon = epsilon
        if isinstance(self.head, Head) and not self.head.adversarial:
            kind = type(self.head).__name__
            kind = kind if self.head.softcap is None else f"{kind} with --logit-softcap"
            raise refusals.ADVERSARIAL.error(
                f"{kind}, in which a target's score is no single logit w'h + b"
            )

    def __call__(self, model: nn.Module, sample: Any, reduce: bool) -> Likelihood:
        """See the base class.

        Raises:
            UnsupportedError: the losses of single tokens.
        """
        if not reduce:
            raise UnsupportedError(
                f"a loss summed over tokens, for {self.flag}",
                "reduce=False",
                "Call the criterion with reduce=True, or drop the flag.",
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
