"""Measure the softmax bottleneck of an AWD-LSTM's output layers; see README.md."""

import sys

try:
    from spectral_fairseq_examples.lm_sotu.bottleneck import main
except ModuleNotFoundError as error:
    sys.exit(
        f"error: expected the Python package {error.name}; found none for {sys.executable}. "
        "Run `make setup`, and use .venv/bin/python."
    )

if __name__ == "__main__":
    sys.exit(main())
