"""Flags of the plain recipe and of each method. Importing this module is quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Tuple

# The adversarial softmax and the mixtures need a criterion of this package, without a penalty.
NO_PENALTY = ("--criterion", "mle_cosreg", "--cosreg-weight", "0")
PLAIN_LOSS = ("--criterion", "label_smoothed_cross_entropy")


@dataclass(frozen=True)
class Method:
    """A method of the comparison.

    Args:
        label: what the table calls it.
        flags: what it adds to the common recipe.
    """

    label: str
    flags: Tuple[str, ...]


METHODS: Dict[str, Method] = {
    "plain": Method("plain", ("--arch", "transformer", *PLAIN_LOSS)),
    "spectrum_control": Method(
        "spectrum control",
        ("--arch", "transformer_sc", "--criterion", "spectrum_control"),
    ),
    "spectrum_control_polynomial": Method(
        "the same, polynomial prior",
        (
            *("--arch", "transformer_sc", "--spectrum-prior", "polynomial"),
            *("--criterion", "spectrum_control"),
        ),
    ),
    "cosreg": Method(
        "cosine regularisation", ("--arch", "transformer", "--criterion", "mle_cosreg")
    ),
    "weight_norm": Method(
        "weight-norm regularisation", ("--arch", "transformer", "--criterion", "weight_norm")
    ),
    "weight_norm_init": Method(
        "weight-norm initialisation",
        ("--arch", "transformer_sc", "--embedding-type", "weight-norm", *PLAIN_LOSS),
    ),
    "weight_norm_init_small": Method(
        "the same, sigma 0.15",
        (
            *("--arch", "transformer_sc", "--embedding-type", "weight-norm", *PLAIN_LOSS),
            *("--weight-norm-init-sigma", "0.15"),
        ),
    ),
    "adversarial": Method(
        "adversarial softmax, 0.01",
        ("--arch", "transformer", *NO_PENALTY, "--adversarial-epsilon", "0.01"),
    ),
    "mos": Method(
        "mixture of 4 softmaxes",
        ("--arch", "transformer_mos", "--mixture-components", "4", *NO_PENALTY),
    ),
    "mos_scaled": Method(
        "the same, contexts scaled by 4",
        (
            *("--arch", "transformer_mos", "--mixture-components", "4"),
            *("--mixture-context-scale", "4", *NO_PENALTY),
        ),
    ),
}
