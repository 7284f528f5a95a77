"""Names that numpy has retired, given back to the few fairseq modules that still use them.

See Note [A module of their own]: some libraries look for exactly these names in numpy itself, to
tell numpy 1 from numpy 2.
"""

from __future__ import annotations

import types
import warnings
from typing import Any, Callable, Dict, Optional

import numpy as np

from spectral_fairseq.compat.patching import Overlay, Patch, replaces, wrapping

_USERS = (
    "fairseq.data.data_utils",
    "fairseq.data.token_block_dataset",
    "fairseq.data.language_pair_dataset",
    "fairseq.modules.dynamic_crf_layer",
)


def _missing() -> Dict[str, Any]:
    """The names that the installed numpy lacks -> what fairseq means by them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        missing: Dict[str, Any] = {
            kind.__name__: kind for kind in (int, float) if not hasattr(np, kind.__name__)
        }
        if not hasattr(getattr(np, "compat", None), "long"):
            missing["compat"] = types.SimpleNamespace(long=int)
        try:
            np.percentile([0, 1], 50, interpolation="lower")  # type: ignore[call-overload]
        except TypeError:
            missing["percentile"] = _percentile(np.percentile)
    return missing


@wrapping
def _percentile(*args: Any, original: Callable[..., Any], **kwargs: Any) -> Any:
    if "interpolation" in kwargs:
        kwargs["method"] = kwargs.pop("interpolation")
    return original(*args, **kwargs)


def _unneeded_numpy_names() -> Optional[str]:
    return None if _missing() else f"numpy {np.__version__} has them all"


def _install_numpy_names() -> str:
    missing = _missing()

    def complete(numpy: types.ModuleType) -> Overlay:
        return Overlay(numpy, **missing)

    return replaces({f"{user}:np": complete for user in _USERS})()


NUMPY_NAMES = Patch(
    name="numpy names",
    reason="fairseq uses np.compat.long, np.int, np.float and np.percentile(interpolation=), which "
    "newer numpy has removed (--sample-break-mode eos, fairseq-interactive, --num-batch-buckets).",
    install=_install_numpy_names,
    unneeded=_unneeded_numpy_names,
)
