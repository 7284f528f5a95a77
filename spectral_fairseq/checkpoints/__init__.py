"""Checkpoint files: reading them safely, finding and averaging the tables they hold."""
