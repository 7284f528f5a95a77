"""Spectrum control, cosine and weight-norm regularisation and mixtures of softmaxes for fairseq.

``--user-dir spectral_fairseq`` imports this package, which mends the host's known defects and
registers the architectures, criterions, tasks and optimisers; importing it again does nothing.
Where fairseq itself cannot be imported, which is logged, nothing is registered: what needs no
fairseq works, ``spectral-fairseq doctor`` included.
"""

import logging

__version__ = "0.1.0"

# At every import the host asks, in the logs, for a package that its speech tasks would use.
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)

from spectral_fairseq import compat, plugin  # noqa: E402

compat.mend_host()  # fairseq comes in here
if compat.why_not_importable() is None:
    plugin.register()
