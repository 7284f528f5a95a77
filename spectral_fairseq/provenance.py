"""Where a figure comes from: versions and devices, hashes of files, and the signature of them."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import re
import sys
from importlib import metadata, util
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

import torch

from spectral_fairseq.errors import CheckpointError, ConfigurationError, needs_extra

_FAIRSEQ_DISTRIBUTIONS = ("fairseq", "ve-fairseq", "fairseq-fixed")
_REPORTED = ("numpy", "omegaconf", "hydra-core", "sacrebleu", "sentencepiece")


def torch_release() -> Tuple[int, int]:
    """Major and minor version of torch."""
    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if numbers is None:
        raise ValueError(f"torch has the version {torch.__version__!r}, not like 2.6.0")
    return int(numbers.group(1)), int(numbers.group(2))


def distribution_version(name: str) -> Optional[str]:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def fairseq_flavour() -> Optional[str]:
    """The distribution that provides the module ``fairseq``, such as 've-fairseq 0.12.3'."""
    for name in _FAIRSEQ_DISTRIBUTIONS:
        version = distribution_version(name)
        if version is not None:
            return f"{name} {version}"
    return "of unknown origin" if util.find_spec("fairseq") is not None else None


def versions() -> Dict[str, Optional[str]]:
    """Versions that a report of a problem should show; None where not installed."""
    installed: Dict[str, Optional[str]] = {
        "spectral-fairseq": distribution_version("spectral-fairseq"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fairseq": fairseq_flavour(),
    }
    installed.update({name: distribution_version(name) for name in _REPORTED})
    return installed


def skip_broken_torchaudio() -> None:
    """Let transformers be imported beside a torchaudio that cannot be loaded.

    transformers imports torchaudio where that is installed. fairseq requires it, so that pip brings
    one that may belong to another build of torch. No text model needs it, so it counts as absent
    then, for the rest of the process.
    """
    try:
        import torchaudio  # noqa: F401
    except (ImportError, OSError):
        # A transformers that was imported before, as CTranslate2 does, has seen the files of
        # torchaudio and imports it in spite of all; then an empty module serves.
        stub = ModuleType("torchaudio") if "transformers" in sys.modules else None
        sys.modules.setdefault("torchaudio", stub)  # type: ignore[arg-type]


def import_transformers() -> Any:
    """The package ``transformers``, also beside a torchaudio that cannot be loaded.

    Raises:
        ConfigurationError: it is not installed, or too new for the installed torch.
    """
    skip_broken_torchaudio()
    with needs_extra("export", "for models of transformers"):
        import transformers
        from transformers import PreTrainedModel  # noqa: F401  # lazy, and fails without torch
    if not transformers.utils.is_torch_available():
        raise ConfigurationError(
            "a version of transformers that works with the installed torch",
            f"transformers {distribution_version('transformers')}, which needs a newer torch",
            'Run pip install "transformers<5", or install a newer torch.',
        )
    return transformers


def signature(parts: Mapping[str, Any]) -> str:
    """One line that says what a figure depends on: the parts, then the versions.

    Args:
        parts: name -> value, such as the seed or the hash of a checkpoint.
    """
    installed = versions()
    package = installed["spectral-fairseq"] or "source"
    both = {**parts, "version": package, "torch": installed["torch"]}
    return "|".join(f"{name}:{value}" for name, value in both.items())


def finite(value: Any) -> Any:
    """``value`` with None in place of NaN and infinities, for which JSON has no form."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


class Noted(NamedTuple):
    """A file as it was before it was read.

    What is measured is read at other times than what is hashed, and a training replaces its
    checkpoints meanwhile: a figure would carry the hash of another file.

    Attributes:
        path: of the file.
        state: its device, inode, size and time of change; None where no file can be seen.
    """

    path: Path
    state: Optional[Tuple[int, ...]]

    @classmethod
    def of(cls, path: Union[str, os.PathLike[str]]) -> Noted:
        """Note what is at a path, before it is read."""
        try:
            found = os.stat(path)
        except OSError:
            return cls(Path(path), None)
        return cls(Path(path), (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))

    def check(self) -> None:
        """Refuse another file in its place, after all has been read.

        Raises:
            CheckpointError: the file was replaced, changed or removed.
        """
        if Noted.of(self.path) != self:
            raise CheckpointError(
                f"{self.path} to stay as it is while it is measured",
                "a file that was replaced or changed meanwhile",
                "Copy it and name the copy, or name a numbered checkpoint, which stays.",
            )


def sha256(path: Union[str, Path], advance: Callable[[int], object] = lambda _: None) -> str:
    """Hash of a file's bytes, hexadecimal; empty for a file that cannot be read.

    ``advance`` is called with the number of bytes of each block that is done.
    """
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
                advance(len(block))
    except OSError:
        return ""
    return digest.hexdigest()


def tensor_sha256(tensor: torch.Tensor, advance: Callable[[int], object] = lambda _: None) -> str:
    """Hash of the bytes of a tensor's numbers, hexadecimal.

    Args:
        tensor: on the CPU, of one dimension or more.
        advance: called with the number of rows of each block that is done.
    """
    digest = hashlib.sha256()
    for block in tensor.detach().split(1 << 12):
        digest.update(block.contiguous().view(torch.uint8).numpy())
        advance(len(block))
    return digest.hexdigest()


def cuda_devices() -> List[str]:
    """Names of the CUDA devices that torch can use."""
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def resolve_user_dir(user_dir: str) -> Optional[str]:
    """Where fairseq would look for ``--user-dir``, in its order.

    Returns:
        The first folder that exists: relative to the working directory, inside the installed
        fairseq, next to it; or None.
    """
    candidates = [os.path.abspath(user_dir)]
    fairseq = util.find_spec("fairseq")
    if fairseq is not None and fairseq.origin is not None:
        home = os.path.dirname(fairseq.origin)
        candidates += [os.path.join(home, user_dir), os.path.join(home, "..", user_dir)]
    for candidate in candidates:
        if os.path.exists(candidate):
            return os.path.abspath(candidate)
    return None
