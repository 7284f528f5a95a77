from __future__ import annotations

from pathlib import Path
from typing import List

import pytest

from tests.compat.fairseq_process import Failure, FairseqProcess


def load(path: str) -> List[List[float]]:
    """Fill a table of two dimensions as --encoder-embed-path does."""
    import torch
    from fairseq import utils
    from fairseq.data import Dictionary

    words = Dictionary()
    words.add_symbol("w0")
    table = torch.nn.Embedding(len(words), 2)
    utils.load_embedding(utils.parse_embedding(path), words, table)
    return table.weight[-1:].tolist()


@pytest.mark.parametrize("content, match", [
    (b"", "an empty file"),
    (b"1 2\nw0 one two\n", "could not convert string to float"),
    (b"1 2\nw0 \xff 1\n", "codec can't decode"),
    (b"1 3\nw0 1 2 3\n", "2 numbers.*found 3 numbers for 'w0'"),
    (b"1 2\nw0 1\n", "2 numbers.*found 1 numbers for 'w0'"),
])  # fmt: skip
def test_unusable_files(
    bare: FairseqProcess, patched: FairseqProcess, tmp_path: Path, content: bytes, match: str
) -> None:
    path = tmp_path / "vectors.txt"
    path.write_bytes(b"1 2\nw0 3 4\nother 5 6\n")
    assert patched.call(load, path=str(path)) == [[3.0, 4.0]]
    path.write_bytes(content)
    if b"w0 1\n" not in content:  # fairseq copies a single number into the whole row
        with pytest.raises(Failure):
            bare.call(load, path=str(path))
    with pytest.raises(Failure, match=match) as caught:
        patched.call(load, path=str(path))
    assert caught.value.kinds[0] in ("DataError", "ConfigurationError")


def test_devices_are_not_read(patched: FairseqProcess) -> None:
    with pytest.raises(Failure, match="/dev/zero; found a device or a pipe"):
        patched.call(load, path="/dev/zero")
