"""Measures of embedding tables and of predictions, one a file."""
