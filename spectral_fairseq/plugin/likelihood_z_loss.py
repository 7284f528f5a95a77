"""The likelihood and lambda (log Z)^2, which keeps the normaliser Z of the softmax near 1.

Chowdhery et al., "PaLM", 2022, https://arxiv.org/abs/2204.02311, section 5; the formula is in
``functional/softmax_loss.py``. The logs keep the likelihood, and have the mean of (log Z)^2 under a
key of its own, in training only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from spectral_fairseq import refusals
from spectral_fairseq.functional.softmax_loss import Losses
from spectral_fairseq.heads.head import Head, SoftmaxHead
from spectral_fairseq.plugin.likelihood import Blockwise, FullScores, Likelihood, LossForm
from spectral_fairseq.plugin.objective import Parts, Term

NAME = "z_loss"


def _measured(losses: Losses, net_output: Any, sample: Any) -> Likelihood:
    # It is part of the loss, and so has no weight here.
    measure = Term(NAME, 0.0, losses.squares.detach() / max(sample["ntokens"], 1))
    plain, nll = losses.plain_loss.detach(), losses.nll.detach()
    return Likelihood(losses.loss, plain, nll, net_output, (measure,))


class ZLossOfScores(FullScores):
    """Computed from the scores of all words.

    Args:
        criterion: the criterion that takes it.
        parts: of the model.
        weight: lambda.

    Raises:
        UnsupportedError: the model's output is not scores with one normaliser.
    """

    def __init__(self, criterion: Any, parts: Parts, weight: float) -> None:
        super().__init__(criterion, parts)
        self.weight = weight
        _check_head(self.head)
        if isinstance(self.head, Head) and not isinstance(self.head, SoftmaxHead):
            raise refusals.Z_LOSS.error(f"the probabilities of {type(self.head).__name__}")

    def __call__(self, model: nn.Module, sample: Any, reduce: bool) -> Likelihood:
        """See the base class."""
        found = super().__call__(model, sample, reduce)
        skip = self.criterion.ignore_prefix_size
        scores = found.net_output[0][:, skip:]
        real = sample["target"][:, skip:].ne(self.criterion.padding_idx)
        wide = scores if scores.dtype == torch.double else scores.float()
        squares = torch.logsumexp(wide, -1).square() * real  # [b, t]
        added = self.weight * (squares.sum() if reduce else squares.view_as(found.loss))
        losses = Losses(found.loss + added, found.loss, found.logged_nll, squares.sum())
        return _measured(losses, found.net_output, sample)


class ZLossOfBlocks(Blockwise):
    """Computed from blocks of scores.

    Args:
        criterion: the criterion that takes it.
        parts: of the model.
        weight: lambda.
        form: of the model's loss.

    Raises:
        UnsupportedError: an output layer without one normaliser, or a caller that asks for its
            scores.
    """

    def __init__(self, criterion: Any, parts: Parts, weight: float, form: LossForm) -> None:
        super().__init__(criterion, parts, form.dense_up_to)
        self.z_loss, self._parts = weight, parts
        _check_head(self.head)
        if self._full_scores:
            ZLossOfScores(criterion, parts, weight)  # which may refuse

    def __call__(self, model: nn.Module, sample: Any, reduce: bool) -> Likelihood:
        """See the base class."""
        if sample["target"].numel() <= self.dense_up_to or not reduce or self._full_scores:
            return ZLossOfScores(self.criterion, self._parts, self.z_loss)(model, sample, reduce)
        return super().__call__(model, sample, reduce)

    def likelihood(self, losses: Losses, net_output: Any, sample: Any) -> Likelihood:
        """See the base class."""
        return _measured(losses, net_output, sample)


def _check_head(head: Any) -> None:
    if isinstance(head, Head) and not head.normalised:
        raise refusals.Z_LOSS.error(type(head).__name__)
