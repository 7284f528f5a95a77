"""The code of ``examples/quickstart``: two recipes that differ in two flags, compared."""
