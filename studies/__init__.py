"""The code behind ``examples/`` and behind the studies of docs/evidence.md and studies/spectrum.

It is not installed with the package. The scripts of ``examples/`` start :mod:`quickstart`,
:mod:`opendocs`, :mod:`sotu` and :mod:`tables`; :mod:`evidence` and :mod:`spectrum` are studies that
are finished or go on, with their records. ``python -m pytest studies`` tests the studies.
"""
