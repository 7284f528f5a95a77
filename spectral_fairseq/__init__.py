"""Spectrum control, cosine and weight-norm regularisation and mixtures of softmaxes for fairseq.

In a fairseq process, which ``--user-dir spectral_fairseq`` always is, importing this package
patches fairseq's known defects and registers the architectures, criterions, tasks and optimisers.
Elsewhere nothing is registered: :mod:`functional`, :mod:`embeddings`, :mod:`heads` and :mod:`lm`
are a torch library that needs no fairseq. ``import spectral_fairseq.plugin`` registers explicitly.
"""

import sys

__version__ = "0.1.0"

if "fairseq" in sys.modules:
    import spectral_fairseq.plugin  # noqa: F401
