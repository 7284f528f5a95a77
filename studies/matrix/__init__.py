"""Installations of many versions: ``make matrix``."""
