"""The likelihood term of the objective: one way to compute it a file."""

from __future__ import annotations

from typing import Any

from torch import nn

from spectral_fairseq.plugin.criterions.likelihood.adversarial import (
    ADVERSARIAL_EPSILON,
    Adversarial,
)
from spectral_fairseq.plugin.criterions.likelihood.base import Likelihood, LikelihoodTerm
from spectral_fairseq.plugin.criterions.likelihood.blockwise import BLOCKWISE_LOSS, Blockwise
from spectral_fairseq.plugin.criterions.likelihood.full_scores import FullScores
from spectral_fairseq.plugin.criterions.output_table import head_of

__all__ = ["FLAGS", "Likelihood", "LikelihoodTerm", "likelihood_term"]

FLAGS = (ADVERSARIAL_EPSILON, BLOCKWISE_LOSS)


def likelihood_term(criterion: Any, options: Any, model: nn.Module) -> LikelihoodTerm:
    """The way that the flags and the model's output layer ask for.

    Args:
        criterion: the criterion that takes it.
        options: the parsed values of :data:`FLAGS`.
        model: what is trained.
    """
    if options.adversarial_epsilon:
        return Adversarial(criterion, options.adversarial_epsilon)
    if options.blockwise_loss or getattr(head_of(model), "own_loss", False):
        return Blockwise(criterion)
    return FullScores(criterion)
