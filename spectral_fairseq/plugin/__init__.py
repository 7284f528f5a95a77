"""What is registered with fairseq, as one explicit list; an import of this package registers it.

Importing it again does nothing. Where fairseq cannot be imported, or not be patched for a feature,
nothing is registered; the reason is logged, and ``spectral-fairseq doctor`` shows it.
"""

from __future__ import annotations

import importlib

from spectral_fairseq import compat

# fairseq's decorators register on import, so each part is imported once, in this order.
PARTS = (
    "spectral_fairseq.plugin.presets",
    "spectral_fairseq.plugin.awd_lstm",
    "spectral_fairseq.plugin.transformer",
    "spectral_fairseq.plugin.transformer_lm",
    "spectral_fairseq.plugin.lstm",
    "spectral_fairseq.plugin.transformer_xl",
    "spectral_fairseq.plugin.muon",
    "spectral_fairseq.plugin.nt_asgd",
    "spectral_fairseq.plugin.task",
)


def register() -> None:
    """Patch fairseq and register every part with it; safe to call more than once."""
    compat.patch_fairseq()  # fairseq is imported here
    if compat.why_not_importable() is not None:
        return
    from spectral_fairseq.plugin import trainer

    if any(applied.status is compat.Status.CANNOT for applied in trainer.patch_for_features()):
        return  # without its patch a feature would train something else
    for part in PARTS:
        importlib.import_module(part)


register()
