"""Checkpoint -> embedding table -> measures -> pictures and report."""
