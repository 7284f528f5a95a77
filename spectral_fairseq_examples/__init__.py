"""The code of the scripts in ``examples/``.

Each folder with scripts has a subpackage of the same name; :mod:`common` holds what they share.
It is a package of its own name, because fairseq has a package ``examples`` that it imports itself.
"""
