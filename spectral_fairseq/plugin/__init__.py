"""The only room that imports fairseq: what is registered with it, as one explicit list."""

from __future__ import annotations

import importlib

# fairseq's decorators register on import, so each part is imported once, in this order.
PARTS = (
    "spectral_fairseq.plugin.progress",
    "spectral_fairseq.plugin.restoring",
    "spectral_fairseq.plugin.criterions.mle_cosreg",
    "spectral_fairseq.plugin.criterions.spectrum_control",
    "spectral_fairseq.plugin.criterions.weight_norm",
    "spectral_fairseq.plugin.models.awd_lstm",
    "spectral_fairseq.plugin.models.lstm",
    "spectral_fairseq.plugin.models.transformer",
    "spectral_fairseq.plugin.models.transformer_lm",
    "spectral_fairseq.plugin.models.transformer_xl",
    "spectral_fairseq.plugin.optim.nt_asgd",
    "spectral_fairseq.plugin.optim.nt_asgd_schedule",
    "spectral_fairseq.plugin.optim.nt_asgd_trainer",
    "spectral_fairseq.plugin.tasks.stateful_language_modeling",
)


def register() -> None:
    """Register every part with fairseq; safe to call more than once."""
    for part in PARTS:
        importlib.import_module(part)
