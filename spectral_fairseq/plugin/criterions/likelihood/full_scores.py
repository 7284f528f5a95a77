"""The likelihood from the scores of all words, as fairseq computes it."""

from __future__ import annotations

from typing import Any

from torch import nn

from spectral_fairseq.plugin.criterions.likelihood.base import Likelihood, LikelihoodTerm


class FullScores(LikelihoodTerm):
    """``label_smoothed_cross_entropy`` unchanged; it holds tokens x words scores."""

    def __call__(self, model: nn.Module, sample: Any, reduce: bool) -> Likelihood:
        """See the base class."""
        net_output = model(**sample["net_input"])
        loss, nll = self.criterion.compute_loss(model, net_output, sample, reduce=reduce)
        return Likelihood(loss, loss.detach(), nll.detach(), net_output)
