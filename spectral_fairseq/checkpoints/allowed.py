"""The only classes and functions that a checkpoint may name.

They only build values: containers, configuration nodes, numpy arrays. None of them opens a file,
imports a module or calls what a checkpoint chooses.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, List, Tuple

import numpy as np

_PLAIN = (
    "argparse.Namespace",  # legacy archs keep their arguments in one
    "builtins.dict",
    "builtins.list",
    "builtins.set",
    "builtins.tuple",
    "builtins.int",
    "builtins.float",
    "builtins.str",
    "builtins.bool",
    "builtins.bytearray",
    "builtins.complex",
    "collections.OrderedDict",
    "collections.defaultdict",
    "collections.Counter",
    "typing.Any",  # the element type that omegaconf keeps with each container
    "_codecs.encode",  # raw bytes in pickle protocol 2, as numpy and torch write them
)

_OMEGACONF = (
    "omegaconf.dictconfig.DictConfig",
    "omegaconf.listconfig.ListConfig",
    "omegaconf.base.ContainerMetadata",
    "omegaconf.base.Metadata",
    "omegaconf.nodes.AnyNode",
    "omegaconf.nodes.BooleanNode",
    "omegaconf.nodes.FloatNode",
    "omegaconf.nodes.IntegerNode",
    "omegaconf.nodes.StringNode",
)

# What worker 0 sends to the others when training resumes: tensors travel apart from the rest.
_FAIRSEQ_HOME, _FAIRSEQ_CLASS = "fairseq.distributed.utils", "_TensorPlaceholder"

# numpy 2 renamed numpy.core; a checkpoint names whichever its writer had.
_NUMPY_INTERNAL = ("_reconstruct", "scalar")
_NUMPY_HOMES = ("numpy._core.multiarray", "numpy.core.multiarray")

_NUMPY_TYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
    "str", "bytes", "datetime64", "timedelta64",
)  # fmt: skip


def allowed_globals() -> List[Tuple[Any, str]]:
    """The allow-list, resolved in this process.

    Returns:
        Pairs of an object and the full dotted name under which a checkpoint may ask for it.
        Names of packages that are not installed are left out, and those of fairseq where it is
        not imported.
    """
    allowed = []
    for name in _PLAIN + _OMEGACONF:
        home, _, attribute = name.rpartition(".")
        try:
            allowed.append((getattr(importlib.import_module(home), attribute), name))
        except (ImportError, AttributeError):
            continue
    if _FAIRSEQ_HOME in sys.modules:
        placeholder = getattr(sys.modules[_FAIRSEQ_HOME], _FAIRSEQ_CLASS)
        allowed.append((placeholder, f"{_FAIRSEQ_HOME}.{_FAIRSEQ_CLASS}"))
    internals = _numpy_internals()
    allowed += [
        (getattr(internals, attribute), f"{home}.{attribute}")
        for home in _NUMPY_HOMES
        for attribute in _NUMPY_INTERNAL
    ]
    allowed += [(np.ndarray, "numpy.ndarray"), (np.dtype, "numpy.dtype")]
    for name in _NUMPY_TYPES:
        dtype_class = type(np.dtype(name))
        allowed.append((dtype_class, f"{dtype_class.__module__}.{dtype_class.__qualname__}"))
    return allowed


def _numpy_internals() -> Any:
    for home in _NUMPY_HOMES:
        try:
            return importlib.import_module(home)
        except ImportError:
            continue
    raise ImportError("numpy has neither numpy._core.multiarray nor numpy.core.multiarray")
