"""Names that numpy has retired, given back to the few fairseq modules that still use them.

See Note [A module of their own]: some libraries look for exactly these names in numpy itself, to
tell numpy 1 from numpy 2.
"""

from __future__ import annotations

import types
import warnings
from typing import Any, Callable, Dict, Optional, Tuple

import numpy as np

from spectral_fairseq.compat.patching import Overlay, Patch, replaces, wrapping

_USES: Dict[str, Tuple[str, ...]] = {
    "fairseq.data.data_utils": ("int", "percentile"),
    "fairseq.data.token_block_dataset": ("compat",),
    "fairseq.data.language_pair_dataset": ("compat",),
    "fairseq.modules.dynamic_crf_layer": ("float",),
}


def _missing() -> Dict[str, Any]:
    """The names that the installed numpy lacks -> what fairseq means by them."""
    meant: Dict[str, Any] = {
        "int": int,
        "float": float,
        "compat": types.SimpleNamespace(long=int),
        "percentile": _percentile(np.percentile),
    }
    return {name: value for name, value in meant.items() if not _still_there(name)}


def _still_there(name: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == "percentile":
            try:
                np.percentile([0, 1], 50, interpolation="lower")  # type: ignore[call-overload]
            except TypeError:
                return False
            return True
        if name == "compat":
            return hasattr(np, "compat") and hasattr(np.compat, "long")
        return hasattr(np, name)


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

    needy = [home for home, names in _USES.items() if missing.keys() & set(names)]
    return replaces({f"{home}:np": complete for home in needy})()


NUMPY_NAMES = Patch(
    name="numpy names",
    reason="fairseq uses np.compat.long, np.int, np.float and np.percentile(interpolation=), which "
    "newer numpy has removed (--sample-break-mode eos, fairseq-interactive, --num-batch-buckets).",
    install=_install_numpy_names,
    unneeded=_unneeded_numpy_names,
)
