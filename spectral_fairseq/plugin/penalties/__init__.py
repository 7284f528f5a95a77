"""Penalties: what one needs of a model, all their declarations, and the terms they add."""
