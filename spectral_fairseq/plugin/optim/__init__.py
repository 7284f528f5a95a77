"""Optimisers and their schedules, registered with fairseq."""
