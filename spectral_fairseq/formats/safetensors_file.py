"""Files of safetensors: the header is checked, and the tensors are mapped from the file.

The safetensors package refuses headers longer than 100 MB or than the file, and tensors that
overlap, leave gaps or end beyond the file. https://github.com/huggingface/safetensors describes
the format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Dict

from torch import Tensor

from spectral_fairseq.checkpoints.reading import READ_FAILURES
from spectral_fairseq.errors import CheckpointError, DamagedError, first_line, needs_extra
from spectral_fairseq.files import is_named_in_utf8
from spectral_fairseq.formats.state_dicts import why_unreadable
from spectral_fairseq.formats.stored import Stored, Unread


def recognise(start: bytes) -> bool:
    """Whether a file begins with the length of a header, eight bytes, and a JSON object."""
    # The length of any real header has zero bytes, which text such as "3000 50" has not.
    return start[8:9] == b"{" and b"\0" in start[:8]


def read(path: Path) -> Stored:
    """The tensors, mapped from the file: only the pages that are used are read.

    Those of types that torch does not have, or hardly computes with, cannot be read.

    Raises:
        CheckpointError: it is not a whole file of this format, or its name is not UTF-8.
        ConfigurationError: the safetensors package is not installed.
    """
    with needs_extra("models", "to read safetensors"):
        import safetensors
    if not is_named_in_utf8(path):
        found = "bytes that are not, which safetensors does not open"
        raise CheckpointError(f"a name in UTF-8 of {path}", found, "Rename the file or its folder.")
    tensors: Dict[str, Tensor] = {}
    unread: Dict[str, Unread] = {}
    try:
        with safetensors.safe_open(str(path), framework="pt", device="cpu") as file:
            for name in file.keys():
                try:
                    tensor = file.get_tensor(name)
                except (safetensors.SafetensorError, AttributeError) as error:
                    piece = file.get_slice(name)
                    kind = f"numbers of type {piece.get_dtype()} ({first_line(error)})"
                    unread[name] = Unread(tuple(piece.get_shape()), kind)
                    continue
                why = why_unreadable(tensor)
                if why is None:
                    tensors[name] = tensor
                else:
                    unread[name] = Unread(tuple(tensor.shape), why)
    except (safetensors.SafetensorError, *READ_FAILURES) as error:
        raise DamagedError(f"a safetensors file at {path}", first_line(error)) from error
    return Stored(str(path), tensors, unread, path)
