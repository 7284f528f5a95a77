"""Names that numpy has retired, given back to the few fairseq modules that still use them.

# Note [A numpy of their own]
Setting ``numpy.int`` or ``numpy.compat`` on numpy itself would change what every other library
in the process sees: some look for exactly these names to tell numpy 1 from numpy 2. Instead the
global ``np`` of four fairseq modules becomes a proxy which has the retired names and passes
everything else on to numpy.
"""

from __future__ import annotations

import functools
import importlib
import types
import warnings
from typing import Any, Callable, Dict, Tuple

import numpy as np

from spectral_fairseq.compat.patching import Outcome, mended, not_needed

NAME = "numpy names"
DEFECT = (
    "fairseq uses np.compat.long, np.int, np.float and np.percentile(interpolation=), which newer "
    "numpy has removed (--sample-break-mode eos, fairseq-interactive, --num-batch-buckets)."
)

_USES: Dict[str, Tuple[str, ...]] = {
    "fairseq.data.data_utils": ("int", "percentile"),
    "fairseq.data.token_block_dataset": ("compat",),
    "fairseq.data.language_pair_dataset": ("compat",),
    "fairseq.modules.dynamic_crf_layer": ("float",),
}


def apply() -> Outcome:
    """Give each module that needs one a numpy proxy with the names that it uses."""
    retired = {name: value for name, value in _retired().items() if not _still_there(name)}
    changed = []
    for home, names in _USES.items():
        missing = {name: retired[name] for name in names if name in retired}
        module = importlib.import_module(home)
        if missing and not isinstance(module.np, _NumpyProxy):
            module.np = _NumpyProxy(missing)  # type: ignore[attr-defined]
            changed.append(home.rpartition(".")[2])
    if not changed:
        return not_needed(f"numpy {np.__version__} has them all, or they were given back before")
    return mended(f"given back in {', '.join(changed)}; numpy itself is unchanged")


def _retired() -> Dict[str, Any]:
    compat = types.SimpleNamespace(long=int)
    return {"int": int, "float": float, "compat": compat, "percentile": _percentile(np.percentile)}


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


def _percentile(percentile: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(percentile)
    def percentile_with_interpolation(*args: Any, **kwargs: Any) -> Any:
        if "interpolation" in kwargs:
            kwargs["method"] = kwargs.pop("interpolation")
        return percentile(*args, **kwargs)

    return percentile_with_interpolation


class _NumpyProxy(types.ModuleType):
    """numpy with a few names more. See Note [A numpy of their own]."""

    def __init__(self, names: Dict[str, Any]) -> None:
        super().__init__("numpy")
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)
