"""Tensors in, tensors out: torch only, no state, no fairseq; one idea a file."""
