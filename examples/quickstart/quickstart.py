"""Compare a fairseq recipe with the same recipe under spectrum control; see README.md."""

import sys
from pathlib import Path

CORPUS = Path(__file__).resolve().parents[1] / "data" / "opendocs_de_en"

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # of this source tree
try:
    from studies.quickstart import main
except ModuleNotFoundError as error:
    sys.exit(
        f"error: expected the Python package {error.name}; found none for {sys.executable}. "
        "Run `make setup`, and use .venv/bin/python."
    )

if __name__ == "__main__":
    sys.exit(main(default_corpus=CORPUS))
