"""The code of ``examples/lm_sotu``: an AWD-LSTM and every method on it."""
