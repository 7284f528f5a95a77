"""The index of a FASTA file is made without a shell.

fairseq writes the path of the data into a shell command, so that a folder or a language called
``$(program)`` runs a program. A language's name comes from the checkpoint.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, List, Optional, Tuple

import numpy as np

from spectral_fairseq.compat.patching import Patch, replaces

Index = Tuple[np.ndarray, np.ndarray]


def _unneeded() -> Optional[str]:
    from fairseq.data.fasta_dataset import FastaDataset

    runs_a_shell = hasattr(FastaDataset, "_build_index")
    return None if runs_a_shell else "this fairseq makes no index of FASTA data"


def fasta_index(path: str) -> Index:
    """Where the records of a FASTA file begin, and how long their sequences are.

    Args:
        path: the file; each record is a line that starts with ``>``, then lines of its sequence.

    Returns:
        Offsets in bytes and lengths in characters, int64, one for each record.
    """
    offsets: List[int] = []
    lengths: List[int] = []
    place = 0
    with open(path, "rb") as file:
        for line in file:
            if line.startswith(b">"):
                offsets.append(place)
                lengths.append(0)
            elif lengths:
                lengths[-1] += len(line.decode("utf-8", "replace").strip())
            place += len(line)
    return np.array(offsets, np.int64), np.array(lengths, np.int64)


def without_shell(build_index: Callable[..., Index]) -> Callable[..., Index]:
    """Replace ``FastaDataset._build_index``.

    Args:
        build_index: fairseq's method.

    Returns:
        A method of the same signature.
    """

    @functools.wraps(build_index)
    def build_without_shell(self: Any, path: str) -> Index:  # noqa: ARG001  (fairseq's signature)
        from fairseq.data.fasta_dataset import fasta_file_path

        return fasta_index(fasta_file_path(path))

    return build_without_shell


PATCH = Patch(
    name="FASTA index",
    reason="fairseq writes the path of FASTA data into a shell command, so that the name of a "
    "folder or a language can run a program.",
    install=replaces({"fairseq.data.fasta_dataset:FastaDataset._build_index": without_shell}),
    unneeded=_unneeded,
)
