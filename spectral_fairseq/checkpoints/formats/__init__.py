"""Models and tables in files of any framework, one format in each file; nothing is executed.

:func:`spectral_fairseq.checkpoints.formats.recognise.open_model` opens whatever a path leads to.
"""
