"""Checkpoint files: reading them safely, finding and rewriting the tables they hold."""
