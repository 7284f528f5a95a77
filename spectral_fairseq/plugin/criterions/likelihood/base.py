"""What the ways to compute a batch's likelihood share."""

from __future__ import annotations

from typing import Any, NamedTuple, Tuple

from torch import Tensor, nn

from spectral_fairseq.plugin.criterions.penalties.penalty import Term


class Likelihood(NamedTuple):
    """The likelihood term of the objective, before any penalty.

    Args:
        loss: to be differentiated; a scalar if reduced.
        logged_loss: what the logs show as the loss.
        logged_nll: the negative log-likelihood without label smoothing, for the logs.
        net_output: of the model; its first entry need not be the scores.
        measures: further values for the logs.
    """

    loss: Tensor
    logged_loss: Tensor
    logged_nll: Tensor
    net_output: Any
    measures: Tuple[Term, ...] = ()


class LikelihoodTerm:
    """A way to compute the label-smoothed likelihood.

    Args:
        criterion: the criterion that takes it: a ``label_smoothed_cross_entropy``.
    """

    def __init__(self, criterion: Any) -> None:
        self.criterion = criterion

    def check(self, model: nn.Module) -> None:
        """Refuse a model that cannot be trained so, before training starts.

        Raises:
            ConfigurationError: the model lacks what this term needs.
        """

    def __call__(self, model: nn.Module, sample: Any, reduce: bool) -> Likelihood:
        """Run the model.

        Args:
            model: in training mode, or with a head whose own loss is used in evaluation.
            sample: a batch as fairseq collates it.
            reduce: sum over the tokens.
        """
        raise NotImplementedError
