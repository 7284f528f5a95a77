"""Read a checkpoint without ever running code from it, with errors that say what to do.

Note [Two safe readers]
-----------------------
From torch 2.6 on, ``torch.load(weights_only=True)`` with an allow-list reads every checkpoint
that fairseq writes. Before that it is missing (1.12), has no allow-list (up to 2.3), or is
unsafe for old archive formats (up to 2.5); there the same allow-list drives an unpickler of our
own, which torch accepts as ``pickle_module``.

Note [Mapped, not read]
-----------------------
Adam's moments make a checkpoint three times its model, and nothing here needs them. From torch
2.1 on, tensors can be mapped from the file: only the pages that are used are read, and the system
may drop them again. The mapping is private, so changing a tensor never changes the file. Archives
of the older format, compressed ones (torch would take compressed bytes for numbers) and files with
names that are not UTF-8 cannot be mapped, and are read as a whole. A file that is cut short in
place while it is mapped ends the process; fairseq and this package replace checkpoints by renaming,
which leaves the mapping intact.
"""

from __future__ import annotations

import os
import pickle
import re
import struct
import threading
import types
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

import torch

from spectral_fairseq.checkpoints.allowed import allowed_globals
from spectral_fairseq.checkpoints.archive import (
    ANOTHER,
    can_be_mapped,
    check_one_archive,
    check_sums,
    entries,
)
from spectral_fairseq.checkpoints.saved import checkpoint_file
from spectral_fairseq.checkpoints.settings import check_settings
from spectral_fairseq.checkpoints.stand_ins import STAND_INS
from spectral_fairseq.checkpoints.tensors import check_model, check_shared_tables
from spectral_fairseq.errors import (
    CheckpointError,
    DamagedError,
    ForbiddenError,
    NotFairseqError,
    UntrustedError,
    first_line,
    listed,
)
from spectral_fairseq.provenance import torch_release

_TORCH_REBUILDERS = (
    "_rebuild_tensor",
    "_rebuild_tensor_v2",
    "_rebuild_parameter",
    "_rebuild_parameter_with_state",
)

READ_FAILURES = (
    pickle.UnpicklingError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What reading a file that is not an intact, plain checkpoint raises, over all torch versions."""

# torch, and the system where a file is mapped, have no class of their own for it.
_NO_MEMORY = re.compile("llocate memory|DefaultCPUAllocator")


def load_checkpoint(path: Union[str, os.PathLike[str]], verify: bool = True) -> Dict[str, Any]:
    """Read a fairseq checkpoint onto the CPU; see Note [Mapped, not read].

    Args:
        path: the file.
        verify: compare the tensors' bytes with the checksums in the file, for which all of it is
            read once.

    Returns:
        The checkpoint as saved: ``model`` (name -> tensor, but for the ``_extra_state`` of
        modules; see :func:`tensors_of`), ``args`` (a Namespace or None) and, in newer ones,
        ``cfg``. :mod:`checkpoints.settings` says what was checked.

    Raises:
        CheckpointError: the file is missing, damaged, names objects outside the allow-list, is
            not a fairseq checkpoint, or holds something else than such a checkpoint does.
    """
    file = checkpoint_file(path)
    state, stored_bytes = read_torch_file(file, verify)
    if not (isinstance(state, dict) and isinstance(state.get("model"), dict)):
        raise not_fairseq(file, state)
    check_settings(state, file)
    check_model(state["model"], file, stored_bytes)
    check_shared_tables(state, file)
    return state


def read_torch_file(file: Path, verify: bool = True) -> Tuple[Any, int]:
    """Read what ``torch.save`` wrote onto the CPU; see Note [Mapped, not read].

    Returns:
        The content, and the bytes that its tensors can have in all.

    Raises:
        CheckpointError: the file is damaged, or names objects outside the allow-list.
    """
    try:
        members = entries(file)
        check_one_archive(members, file)
        if verify:
            check_sums(members, file)
        options: Dict[str, Any] = {"map_location": "cpu"}
        if torch_release() >= (2, 1) and can_be_mapped(members, file):
            options["mmap"] = True
        state = _with_plain_tensors(torch_load(str(file), **options))
        return state, sum(member.file_size for member in members) or os.path.getsize(file)
    except CheckpointError:
        raise
    except PermissionError as error:
        raise ForbiddenError(f"a readable checkpoint at {file}", str(error)) from error
    except READ_FAILURES as error:
        raise explain_failure(file, error) from error


def _with_plain_tensors(state: Any) -> Any:
    """The same content; a tensor on which the file sets attributes loses them.

    They could hide the methods of the tensor, such as ``dim``.
    """
    held = [state]
    pending: List[Any] = [held]
    seen: Dict[int, Any] = {}
    while pending:
        container = pending.pop()
        if id(container) in seen:
            continue
        seen[id(container)] = container  # kept, so that no other gets its identity
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for name, value in list(items):
            if isinstance(value, (dict, list, tuple)):
                pending.append(value)
            plain = _plain(value)
            if type(value) is tuple and any(_plain(one) is not one for one in value):
                plain = tuple(map(_plain, value))
            if plain is not value and not isinstance(container, tuple):
                container[name] = plain
    return held[0]


def _plain(value: Any) -> Any:
    has_attributes = type(value) in (torch.Tensor, torch.nn.Parameter) and bool(vars(value))
    return torch.Tensor.detach(value) if has_attributes else value


def tensors_of(model: Mapping[str, Any]) -> Dict[str, torch.Tensor]:
    """A checkpoint's ``model`` without what is no tensor; see :func:`load_checkpoint`."""
    return {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}


def lack_of_memory(path: Union[str, Path], error: BaseException) -> Optional[CheckpointError]:
    """The error for a file that takes more memory than there is; None for other failures."""
    if not isinstance(error, MemoryError) and _NO_MEMORY.search(str(error)) is None:
        return None
    return CheckpointError(
        f"memory to read {path}, a file of {os.path.getsize(path):,} bytes",
        first_line(error),
        "Free memory, or take a machine with more; a table in .npy or safetensors is mapped, and "
        "takes none. If the file cannot need so much, it is damaged: copy it again.",
    )


def explain_failure(path: Union[str, Path], error: BaseException) -> CheckpointError:
    """Turn a failure of ``torch.load`` into an error that says what to do."""
    lacking = lack_of_memory(path, error)
    if lacking is not None:
        return lacking
    foreign = re.search(r"GLOBAL ([\w.<>]+)", str(error))
    if foreign:
        return UntrustedError(
            f"a checkpoint that holds only tensors and plain settings in {path}",
            f"the object {foreign.group(1)}, which could run code when loaded",
        )
    if isinstance(error, (AttributeError, ImportError)):
        return CheckpointError(
            f"a checkpoint whose objects exist in this environment in {path}",
            first_line(error),
            "Give the --user-dir of the plugin that wrote it, or save it again without them.",
        )
    if _is_python_pickle(path):
        return _of_code("a pickle of Python", path)
    if isinstance(error, pickle.UnpicklingError) and _has_intact_pickle(path):
        # torch explains at length how to run the file's code; its cause stands behind the colon.
        said = re.search(r"but got (<class .+>)|WeightsUnpickler error:\s*(.+)", str(error))
        content = (said[1] or said[2]) if said else first_line(error)
        return CheckpointError(
            f"a checkpoint of tensors, arrays of numbers or text, and plain settings in {path}",
            f"an intact file with content that is not supported: {content[:200]}",
            "Save it again without that content, or model.state_dict() alone.",
        )
    # Where torch fails to read a file it suggests weights_only=False, which would run its code.
    cause = "" if "weights_only" in str(error) else f" ({first_line(error)})"
    return DamagedError(
        f"an intact checkpoint in {path}",
        f"a file of {os.path.getsize(path):,} bytes that cannot be read{cause}",
        ANOTHER,
    )


def _of_code(what: str, path: Any) -> CheckpointError:
    return CheckpointError(
        f"a checkpoint written by torch.save in {path}",
        f"{what}, which could run code when loaded",
        "Save the model's state dict with torch.save, or a table alone with numpy.save.",
    )


def _has_intact_pickle(path: Union[str, Path]) -> bool:
    """Whether the bytes of what torch.save wrote beside the tensors are those of its checksum."""
    try:
        with zipfile.ZipFile(path) as opened:
            names = [name for name in opened.namelist() if name.endswith("data.pkl")]
            return bool(names) and all(opened.read(name) for name in names)
    except READ_FAILURES:
        return False


def _is_python_pickle(path: Union[str, Path]) -> bool:
    """Whether a file begins as pickle.dump writes it, of a later protocol than torch.save takes."""
    with open(path, "rb") as file:
        start = file.read(2)
    return start[:1] == b"\x80" and start[1:] > b"\x02"


def not_fairseq(path: Union[str, Path], state: Any) -> CheckpointError:
    """The error for a file that torch can read but fairseq did not write."""
    if isinstance(state, dict):
        keys = listed(sorted(map(str, state)), 5)
        found = f"a dictionary with the entries {keys}" if state else "an empty dictionary"
    else:
        found = f"an object of type {type(state).__name__}"
    return NotFairseqError(
        f"a fairseq checkpoint, a dictionary with the entry 'model', in {path}", found
    )


_STAND_INS_ALLOWED = threading.Lock()  # one thread ends what another would still need


def torch_load(file: Any, **options: Any) -> Any:
    """``torch.load`` that never runs code from the file; see Note [Two safe readers].

    Plain objects of fairseq come as stand-ins; see :mod:`spectral_fairseq.checkpoints.stand_ins`.

    Args:
        file: a path or an open file.
        options: those of ``torch.load``, but for ``weights_only`` and ``pickle_module``.

    Returns:
        The content of the file.

    Raises:
        pickle.UnpicklingError: the file names an object outside the allow-list.
        CheckpointError: it is a TorchScript archive, which is code.
        Exception: one of :data:`READ_FAILURES`, if the file is damaged.
    """
    _refuse_torchscript(file)
    if torch_release() < (2, 6):
        return torch.load(file, pickle_module=_restricted_pickle(), **options)
    torch.serialization.add_safe_globals(list(allowed_globals()))
    stand_ins = [(kind, name) for name, kind in STAND_INS.items()]
    # Others who call torch.load may have allowed fairseq's own classes under these names.
    with _STAND_INS_ALLOWED, torch.serialization.safe_globals(stand_ins):  # type: ignore[arg-type]
        with warnings.catch_warnings():
            # torch asks to report a newer pickle protocol than its own; the result says enough.
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            return torch.load(file, weights_only=True, **options)


def _refuse_torchscript(file: Any) -> None:
    """Refuse what torch before 2.6 hands to torch.jit.load, which runs it, whatever the pickler.

    It asks the functions by which torch.load itself decides, so that both see the same archive.
    """
    serialization = torch.serialization
    with serialization._open_file_like(file, "rb") as opened:
        start = opened.tell()
        if not serialization._is_zipfile(opened):
            return
        with serialization._open_zipfile_reader(opened) as archive:
            is_code = serialization._is_torchscript_zip(archive)
        opened.seek(start)
    if is_code:
        raise _of_code("a TorchScript archive", getattr(file, "name", file))


# Pickles of protocol 2, which torch writes, name types as Python 2 does.
_NAMES_OF_PYTHON_2 = {
    ("__builtin__", "long"): ("builtins", "int"),
    ("__builtin__", "unicode"): ("builtins", "str"),
}


def _restricted_pickle() -> Any:
    allowed: Dict[str, Any] = {**STAND_INS, **{name: value for value, name in allowed_globals()}}
    for rebuilder in _TORCH_REBUILDERS:
        if hasattr(torch._utils, rebuilder):
            allowed[f"torch._utils.{rebuilder}"] = getattr(torch._utils, rebuilder)
    for name in ("Size", "device"):
        allowed[f"torch.{name}"] = getattr(torch, name)
    for name, value in vars(torch).items():
        if isinstance(value, torch.dtype) or name.endswith("Storage"):
            allowed[f"torch.{name}"] = value
    allowed["torch.nn.parameter.Parameter"] = torch.nn.Parameter

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            module, name = _NAMES_OF_PYTHON_2.get((module, name), (module, name))
            full_name = f"{module.replace('__builtin__', 'builtins')}.{name}"
            if full_name not in allowed:
                raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {full_name}")
            return allowed[full_name]

    def load(file: Any, **options: Any) -> Any:
        return Unpickler(file, **options).load()

    restricted: Any = types.ModuleType("restricted_pickle")
    restricted.Unpickler = Unpickler
    restricted.load = load
    return restricted
