"""Trainings that hydra's joblib launcher starts can load data in processes of their own.

joblib makes its own way of starting processes the default one in its workers. It cannot start those
of ``torch.utils.data.DataLoader``, which fails with "'Process' object has no attribute 'env'".
"""

from __future__ import annotations

import multiprocessing
from typing import Optional

from spectral_fairseq.compat.patching import Patch


def _unneeded() -> Optional[str]:
    method = multiprocessing.get_start_method(allow_none=True)
    return None if method == "loky" else "joblib has not started this process"


def _install() -> str:
    default = multiprocessing.get_all_start_methods()[0]
    multiprocessing.set_start_method(default, force=True)
    return f"processes start by {default}, as outside of joblib"


PATCH = Patch(
    name="data loading under joblib",
    reason="Under hydra's joblib launcher data can be loaded with dataset.num_workers=0 only, "
    "because joblib changes how processes are started.",
    install=_install,
    unneeded=_unneeded,
)
