"""A safetensors file: its header is checked, and its tensors are mapped from the file.

The safetensors package refuses headers longer than 100 MB or than the file, and tensors that
overlap, leave gaps or end beyond the file. https://github.com/huggingface/safetensors describes
the format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Dict, Tuple

from torch import Tensor

from spectral_fairseq.checkpoints.reading import READ_FAILURES, first_line
from spectral_fairseq.checkpoints.tables import Unread
from spectral_fairseq.errors import CheckpointError, ConfigurationError


def looks_like_safetensors(start: bytes) -> bool:
    """Whether a file begins with the length of a header, eight bytes, and a JSON object.

    Args:
        start: its first bytes, at least nine.
    """
    # The length of any real header has zero bytes, which text such as "3000 50" has not.
    return start[8:9] == b"{" and b"\0" in start[:8]


def read_safetensors(path: Path) -> Tuple[Dict[str, Tensor], Dict[str, Unread]]:
    """Name -> tensor, mapped from the file: only the pages that are used are read.

    The second mapping has the tensors of types that torch does not have.

    Args:
        path: the file.

    Raises:
        CheckpointError: it is not a whole file of this format.
        ConfigurationError: the safetensors package is not installed.
    """
    try:
        import safetensors
    except ImportError as error:
        raise ConfigurationError(
            "the package safetensors, to read files of that format",
            "no such package",
            "Run pip install safetensors.",
        ) from error
    tensors: Dict[str, Tensor] = {}
    unread: Dict[str, Unread] = {}
    try:
        with safetensors.safe_open(str(path), framework="pt", device="cpu") as file:
            for name in file.keys():
                try:
                    tensors[name] = file.get_tensor(name)
                except (safetensors.SafetensorError, AttributeError) as error:
                    piece = file.get_slice(name)
                    kind = f"numbers of type {piece.get_dtype()} ({first_line(error)})"
                    unread[name] = Unread(tuple(piece.get_shape()), kind)
        return tensors, unread
    except (safetensors.SafetensorError, *READ_FAILURES) as error:
        raise CheckpointError(
            f"a whole safetensors file at {path}",
            first_line(error),
            "It is truncated, damaged, or not of this format or a newer one: copy or download it "
            "again.",
        ) from error
