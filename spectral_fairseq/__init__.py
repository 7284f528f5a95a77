"""Spectrum control, cosine and weight-norm regularisation and mixtures of softmaxes for fairseq.

``--user-dir spectral_fairseq`` imports this package, which mends the host's known defects and
registers the architectures, criterions, tasks and optimisers; importing it again does nothing.
"""

__version__ = "0.1.0"

from spectral_fairseq import compat, plugin

compat.mend_host()
plugin.register()
