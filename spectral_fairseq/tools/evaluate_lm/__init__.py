"""The work of ``spectral-fairseq evaluate-lm``: options, grid search, evaluation, document."""
