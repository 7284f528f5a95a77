"""The task ``stateful_language_modeling``: contiguous streams with a carried state."""
