"""The code of ``examples/translation_opendocs_de_en``: every method at one budget."""
