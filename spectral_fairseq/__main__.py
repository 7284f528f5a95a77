"""``python -m spectral_fairseq`` is the command ``spectral-fairseq``."""

import sys

from spectral_fairseq.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
