"""Write the corpus of presidential messages as text files; see README.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # of this source tree
try:
    from studies.sotu_corpus import main
except ModuleNotFoundError as error:
    sys.exit(
        f"error: expected the Python package {error.name}; found none for {sys.executable}. "
        "Run `make setup`, and use .venv/bin/python."
    )

if __name__ == "__main__":
    sys.exit(main())
