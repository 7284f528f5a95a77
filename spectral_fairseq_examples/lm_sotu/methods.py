"""Flags of the AWD-LSTM and of each paper's method on it. Importing this module is quick.

The criterions of this package apply activation regularisation, which is part of an AWD-LSTM; with
its own weight at 0, ``mle_cosreg`` is cross entropy and that alone.
"""

from __future__ import annotations

from typing import Dict, Tuple

NO_PENALTY = ("--criterion", "mle_cosreg", "--cosreg-weight", "0")
SOFTMAX = ("--arch", "awd_lstm_wt2", "--blockwise-loss")

METHODS: Dict[str, Tuple[str, ...]] = {
    "awd_lstm": (*SOFTMAX, *NO_PENALTY),
    "cosreg": (*SOFTMAX, "--criterion", "mle_cosreg"),
    "spectrum_control": (
        *SOFTMAX,
        *("--embedding-type", "svd", "--spectrum-prior", "exponential"),
        *("--criterion", "spectrum_control"),
    ),
    "spectrum_control_polynomial": (
        *SOFTMAX,
        *("--embedding-type", "svd", "--spectrum-prior", "polynomial"),
        *("--criterion", "spectrum_control"),
    ),
    "weight_norm": (*SOFTMAX, "--criterion", "weight_norm"),
    "weight_norm_init": (*SOFTMAX, *NO_PENALTY, "--embedding-type", "weight-norm"),
    "adversarial": (*("--arch", "awd_lstm_wt2"), *NO_PENALTY, "--adversarial-epsilon", "0.01"),
    "mos": (
        *("--arch", "awd_lstm_mos_wt2", "--mixture-components", "4", "--mixture-dropout", "0.1"),
        *NO_PENALTY,
        *("--lr", "15"),  # as published; at 30 the loss does not fall
    ),
}
