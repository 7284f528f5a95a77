"""Compare every method with plain fairseq on one translation corpus; see README.md."""

import sys
from pathlib import Path

CORPUS = Path(__file__).resolve().parents[1] / "data" / "opendocs_de_en"

try:
    from spectral_fairseq_examples.translation_opendocs_de_en.command import main
except ModuleNotFoundError as error:
    sys.exit(
        f"error: expected the Python package {error.name}; found none for {sys.executable}. "
        "Run `make setup`, and use .venv/bin/python."
    )

if __name__ == "__main__":
    sys.exit(main(default_corpus=CORPUS))
