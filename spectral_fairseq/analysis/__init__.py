"""Model -> embedding table -> measures -> pictures and report.

``from spectral_fairseq.analysis import analyze`` is all that is needed in Python, and
``training_measures`` in callbacks: :mod:`spectral_fairseq.analysis.api`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spectral_fairseq.analysis.api import Report, analyze, training_measures

__all__ = ["Report", "analyze", "training_measures"]


def __getattr__(name: str) -> Any:
    # The command line imports modules of this package before it knows whether torch is needed.
    if name in __all__:
        from spectral_fairseq.analysis import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
