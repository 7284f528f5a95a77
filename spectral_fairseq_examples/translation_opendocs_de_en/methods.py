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


def _softmax(label: str, *flags: str) -> Method:
    """The plain architecture and loss with flags that need a criterion of this package."""
    return Method(label, ("--arch", "transformer", *NO_PENALTY, *flags))


METHODS: Dict[str, Method] = {
    "plain": Method("plain", ("--arch", "transformer", *PLAIN_LOSS)),
    "spectrum_control": Method(
        "spectrum control",
        ("--arch", "transformer_sc", "--criterion", "spectrum_control"),
    ),
    "spectrum_control_paper": Method(
        "the same, factors not renewed",
        ("--arch", "transformer_sc", "--criterion", "spectrum_control", "--svd-interval", "0"),
    ),
    "spectrum_control_polynomial": Method(
        "the same, polynomial prior",
        (
            *("--arch", "transformer_sc", "--spectrum-prior", "polynomial"),
            *("--criterion", "spectrum_control", "--svd-interval", "0"),
        ),
    ),
    "decoupled": Method(
        "decoupled spectrum control",
        ("--arch", "transformer", "--criterion", "spectrum_control"),
    ),
    "cosreg": Method(
        "cosine regularisation", ("--arch", "transformer", "--criterion", "mle_cosreg")
    ),
    "weight_norm": Method(
        "weight-norm regularisation", ("--arch", "transformer", "--criterion", "weight_norm")
    ),
    "weight_norm_init": Method(
        "weight-norm initialisation",
        (
            *("--arch", "transformer_sc", "--embedding-type", "weight-norm", *PLAIN_LOSS),
            *("--weight-norm-init-sigma", "0.5"),
        ),
    ),
    "weight_norm_init_small": Method(
        "the same, sigma 0.15",
        (
            *("--arch", "transformer_sc", "--embedding-type", "weight-norm", *PLAIN_LOSS),
            *("--weight-norm-init-sigma", "0.15"),
        ),
    ),
    "adversarial": _softmax("adversarial softmax, 0.01", "--adversarial-epsilon", "0.01"),
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
    "rdrop": _softmax("R-Drop, alpha 5", "--rdrop-weight", "5"),
    "simcut": _softmax("SimCut, alpha 3, p 0.05", "--simcut-weight", "3"),
    "gradient_gating": _softmax(
        "adaptive gradient gating, alpha 0.03", "--gradient-gating", "0.03"
    ),
    "coupled_adam": Method(
        "Coupled Adam", ("--arch", "transformer", *PLAIN_LOSS, "--optimizer", "coupled_adam")
    ),
    "mean_vector": _softmax("mu-loss, 0.0001", "--mean-vector-weight", "0.0001"),
    "sigsoftmax": Method(
        "sigsoftmax",
        (
            *("--arch", "transformer_sc", "--embedding-type", "plain", *NO_PENALTY),
            *("--output-head", "sigsoftmax"),
        ),
    ),
}
