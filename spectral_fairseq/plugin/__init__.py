"""What is registered with fairseq, as one explicit list; importing this room patches and registers.

Importing it again does nothing. Where fairseq cannot be imported, which is logged, nothing is
registered.
"""

from __future__ import annotations

import importlib
import logging

from spectral_fairseq import compat

# fairseq's decorators register on import, so each part is imported once, in this order.
PARTS = (
    "spectral_fairseq.plugin.hooks.training_progress",
    "spectral_fairseq.plugin.hooks.table_kinds",
    "spectral_fairseq.plugin.criterions.presets",
    "spectral_fairseq.plugin.models.awd_lstm",
    "spectral_fairseq.plugin.models.lstm",
    "spectral_fairseq.plugin.models.transformer",
    "spectral_fairseq.plugin.models.transformer_lm",
    "spectral_fairseq.plugin.models.transformer_xl",
    "spectral_fairseq.plugin.optim.nt_asgd",
    "spectral_fairseq.plugin.optim.nt_asgd_schedule",
    "spectral_fairseq.plugin.hooks.nt_asgd",
    "spectral_fairseq.plugin.hooks.streams",
    "spectral_fairseq.plugin.tasks.stateful_language_modeling",
)


def register() -> None:
    """Patch fairseq and register every part with it; safe to call more than once."""
    # At every import fairseq logs that a package of its speech tasks is missing.
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    compat.mend_host()  # fairseq is imported here
    if compat.why_not_importable() is None:
        for part in PARTS:
            importlib.import_module(part)


register()
