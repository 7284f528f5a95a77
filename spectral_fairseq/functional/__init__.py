"""Functions of tensors: torch only, no state, no fairseq; one method in each file."""
