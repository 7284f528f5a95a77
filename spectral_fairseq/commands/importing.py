"""Importing fairseq and this plugin, for the subcommands that build models."""

from __future__ import annotations

import logging

from spectral_fairseq.errors import UnsupportedError

_REMEDY = "Run spectral-fairseq doctor; docs/compatibility.md lists versions that work together."


INSTALL_FAIRSEQ = (
    'Run pip install ".[fairseq]" in a clone of this package, with Python 3.9 to 3.12, or install '
    "the fairseq that you use."
)


def import_plugin() -> None:
    """Import fairseq, patch it, and register this package with it."""
    from spectral_fairseq.compat import why_not_importable

    logging.disable(logging.INFO)  # fairseq recommends packages while it is imported
    try:
        obstacle = why_not_importable()
        if obstacle is not None:
            remedy = INSTALL_FAIRSEQ if "No module named 'fairseq'" in obstacle else _REMEDY
            raise UnsupportedError("a fairseq that can be imported", obstacle, remedy)
        import spectral_fairseq.plugin  # noqa: F401
    finally:
        logging.disable(logging.NOTSET)

    # Importing fairseq sets the root logger to DEBUG, and so that of every other library.
    logging.getLogger().setLevel(logging.WARNING)
