"""Model -> embedding table -> measures -> pictures and report.

``from spectral_fairseq.analysis import analyze`` is all that is needed in Python:
:func:`spectral_fairseq.analysis.api.analyze`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spectral_fairseq.analysis.api import Report, analyze

__all__ = ["Report", "analyze"]


def __getattr__(name: str) -> Any:
    # The command line imports modules of this package before it knows whether torch is needed.
    if name in __all__:
        from spectral_fairseq.analysis import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
