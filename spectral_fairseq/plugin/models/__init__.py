"""Architectures registered with fairseq."""
