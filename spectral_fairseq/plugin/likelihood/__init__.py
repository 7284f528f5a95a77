"""The likelihood term of the objective: one way to compute it a file."""

from __future__ import annotations

from typing import Any

from spectral_fairseq import options as declared
from spectral_fairseq import refusals
from spectral_fairseq.plugin.likelihood.adversarial import (
    ADVERSARIAL_EPSILON,
    Adversarial,
    AdversarialBlocks,
)
from spectral_fairseq.plugin.likelihood.consistency import (
    RDROP_WEIGHT,
    SIMCUT_CUTOFF,
    SIMCUT_WEIGHT,
    Consistency,
)
from spectral_fairseq.plugin.likelihood.gradient_gating import (
    GRADIENT_GATING,
    GRADIENT_GATING_MEMORY,
    GradientGating,
)
from spectral_fairseq.plugin.likelihood.plain import (
    LOSS_FORM,
    Blockwise,
    FullScores,
    Likelihood,
    LikelihoodTerm,
    LossForm,
    form_for,
)
from spectral_fairseq.plugin.likelihood.z_loss import Z_LOSS, ZLossOfBlocks, ZLossOfScores
from spectral_fairseq.plugin.penalties.view import Parts

__all__ = [
    "FLAGS",
    "Likelihood",
    "LikelihoodTerm",
    "LossForm",
    "form_for",
    "likelihood_term",
    "plain_likelihood",
    "read_options",
]


FLAGS = (
    ADVERSARIAL_EPSILON,
    RDROP_WEIGHT,
    SIMCUT_WEIGHT,
    SIMCUT_CUTOFF,
    GRADIENT_GATING,
    GRADIENT_GATING_MEMORY,
    Z_LOSS,
    LOSS_FORM,
)
# Each changes the likelihood, or its gradient, in a way of its own.
EXCLUSIVE = (ADVERSARIAL_EPSILON, RDROP_WEIGHT, SIMCUT_WEIGHT, GRADIENT_GATING, Z_LOSS)


def read_options(cfg: Any) -> Any:
    """The parsed values of :data:`FLAGS`.

    Raises:
        ConfigurationError: a value outside its range, or flags that exclude each other.
    """
    options = declared.read_options(FLAGS, cfg)
    used = [one.flag for one in EXCLUSIVE if getattr(options, one.name)]
    if len(used) > 1:
        raise refusals.SEVERAL_METHODS.error(" and ".join(used))
    if options.loss_form == "blockwise" and options.gradient_gating:
        raise refusals.GATING.error("--loss-form blockwise")
    return options


def likelihood_term(criterion: Any, parts: Parts, options: Any, form: LossForm) -> LikelihoodTerm:
    """The way that the flags and the model's output layer ask for, in training.

    Args:
        criterion: the criterion that takes it.
        parts: of the model.
        options: the parsed values of :data:`FLAGS`.
        form: of the model's loss.
    """
    if options.adversarial_epsilon:
        if form.blockwise:
            return AdversarialBlocks(
                criterion, parts, options.adversarial_epsilon, form.dense_up_to
            )
        return Adversarial(criterion, parts, options.adversarial_epsilon)
    if options.rdrop_weight or options.simcut_weight:
        return Consistency(criterion, parts, options, options.loss_form != "dense")
    if options.gradient_gating:
        return GradientGating(criterion, parts, options.gradient_gating)
    if options.z_loss:
        if form.blockwise:
            return ZLossOfBlocks(criterion, parts, options.z_loss, form)
        return ZLossOfScores(criterion, parts, options.z_loss)
    return plain_likelihood(criterion, parts, form)


def plain_likelihood(criterion: Any, parts: Parts, form: LossForm) -> LikelihoodTerm:
    """The likelihood that is reported in evaluation, and trained where no method changes it."""
    if form.blockwise:
        return Blockwise(criterion, parts, form.dense_up_to)
    return FullScores(criterion, parts)
