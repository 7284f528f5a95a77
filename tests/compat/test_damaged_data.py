"""Binarised data that are cut, of another format, or of another dictionary."""

from __future__ import annotations

import os
import shutil
import struct
import time
from pathlib import Path
from typing import Any, Callable, Dict

import numpy as np
import pytest
import torch

from spectral_fairseq.checkpoints.indexed import check_indexed_files
from spectral_fairseq.errors import DataError
from tests.compat.conftest import train_arguments
from tests.compat.fairseq_process import Failure, FairseqProcess

WORDS = 24  # of the dictionary of the fixture `data`


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def change(path: Path, place: int, form: str, value: int) -> None:
    content = bytearray(path.read_bytes())
    struct.pack_into(form, content, place, value)
    path.write_bytes(bytes(content))


def replaced_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


# How a split's file is damaged, and what the error says. The header of an index has 26 bytes.
DAMAGES: Dict[str, Any] = {
    "bin cut": ("bin", lambda path: cut(path, 101), "within the 101 bytes"),
    "bin empty": ("bin", lambda path: cut(path, 0), "within the 0 bytes"),
    "bin missing": ("bin", Path.unlink, "both files of the split"),
    "bin a pipe": ("bin", replaced_by_pipe, "a device or a pipe"),
    "bin of another dictionary": (
        "bin",
        lambda path: change(path, 4, "<H", WORDS),
        f"the {WORDS} words of the dictionary in .*; found {WORDS}",
    ),
    "idx cut": ("idx", lambda path: cut(path, 333), "333 bytes whose header or length"),
    "idx cut in the header": ("idx", lambda path: cut(path, 12), "12 bytes whose header or length"),
    "idx empty": ("idx", lambda path: cut(path, 0), "the first bytes b''"),
    "idx of bad magic": ("idx", lambda path: change(path, 0, "<B", 0), "made by fairseq-preproc"),
    "idx of another version": ("idx", lambda path: change(path, 9, "<Q", 2), "header or length"),
    "idx of floats": ("idx", lambda path: change(path, 17, "<B", 7), "header or length"),
    "idx of huge count": ("idx", lambda path: change(path, 18, "<Q", 2**62), "header or length"),
    "idx of negative length": ("idx", lambda path: change(path, 26, "<i", -5), "negative length"),
    "idx of huge length": ("idx", lambda path: change(path, 26, "<i", 2**30), "that ends at byte"),
    "idx of negative place": ("idx", lambda path: change(path, -8, "<q", -2), "negative length"),
    "idx without sentences": (
        "idx",
        lambda path: path.write_bytes(path.read_bytes()[:18] + bytes(8)),
        "at least one sentence",
    ),
}


def read_all(prefix: str, dictionary: str) -> int:
    """Open a split as tasks do, and look up every token."""
    import torch
    from fairseq.data import Dictionary, data_utils

    words = Dictionary.load(dictionary)
    split = data_utils.load_indexed_dataset(prefix, words)
    table = torch.zeros(len(words), 1)
    return sum(len(table[split[number]]) for number in range(len(split)))


@pytest.fixture
def copy(data: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(data, tmp_path / "copy"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(damage: str, copy: Path) -> None:
    ending, apply, match = DAMAGES[damage]
    prefix = str(copy / "train.de-en.de")
    check_indexed_files(prefix, WORDS)
    apply(Path(f"{prefix}.{ending}"))
    with pytest.raises(DataError, match=match) as caught:
        check_indexed_files(prefix, WORDS)
    assert f"train.de-en.de.{ending}" in str(caught.value)


@pytest.mark.parametrize("damage", ["bin cut", "bin of another dictionary", "idx cut"])
def test_a_task_that_opens_it_is_told(
    damage: str, bare: FairseqProcess, patched: FairseqProcess, copy: Path
) -> None:
    ending, apply, match = DAMAGES[damage]
    files = {"prefix": str(copy / "train.de-en.de"), "dictionary": str(copy / "dict.de.txt")}
    assert patched.call(read_all, **files) > 500
    apply(copy / f"train.de-en.de.{ending}")
    with pytest.raises(Failure) as caught:
        bare.call(read_all, **files)
    assert "DataError" not in caught.value.kinds
    with pytest.raises(Failure, match=match) as caught:
        patched.call(read_all, **files)
    assert "DataError" in caught.value.kinds


def older_format(prefix: Path, sentences: Any) -> None:
    """Write a split as fairseq did before --dataset-impl mmap."""
    from fairseq.data.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    for sentence in sentences:
        builder.add_item(sentence)
    builder.data_offsets = [int(offset) for offset in builder.data_offsets]
    builder.finalize(f"{prefix}.idx")


OLDER_DAMAGES: Dict[str, Callable[[Path], None]] = {
    "bin": lambda prefix: cut(Path(f"{prefix}.bin"), 5),
    "idx": lambda prefix: cut(Path(f"{prefix}.idx"), 90),
    "header": lambda prefix: change(Path(f"{prefix}.idx"), 32, "<Q", 2**61),
    "offsets": lambda prefix: change(Path(f"{prefix}.idx"), 80, "<q", 2**40),
    "token": lambda prefix: change(Path(f"{prefix}.bin"), 0, "<i", 0),
}


@pytest.mark.parametrize("damage", OLDER_DAMAGES)
def test_the_older_format(damage: str, tmp_path: Path) -> None:
    prefix = tmp_path / "train"
    older_format(prefix, [torch.tensor([4, 9, 2]), torch.tensor([5, 2])])
    check_indexed_files(str(prefix), 10)
    with pytest.raises(DataError, match="found 9"):
        check_indexed_files(str(prefix), 9)
    OLDER_DAMAGES[damage](prefix)
    with pytest.raises(DataError, match=str(prefix)):
        check_indexed_files(str(prefix), 10)


def test_training_refuses_before_the_first_update(
    patched: FairseqProcess, copy: Path, tmp_path: Path
) -> None:
    cut(copy / "train.de-en.en.bin", 100)
    with pytest.raises(Failure, match="train.de-en.en.bin") as caught:
        patched.cli("fairseq_cli.train", *train_arguments(copy, tmp_path / "saved"))
    assert caught.value.kinds[0] == "DataError"
    assert not list((tmp_path / "saved").glob("*.pt"))


@pytest.mark.parametrize("line, match", [
    ("w -3", "-3 of 'w'"),
    (f"w {2**63}", f"{2**63} of 'w'"),
    ("w \u00b2", "Incorrect dictionary format"),
    ("w " + "9" * 5000, "Incorrect dictionary format|9999 of 'w'|99999"),
    ("w7011", "Incorrect dictionary format.*w7011"),
    ("w0 1", "Duplicate word"),
    ("\udcff 1", "Incorrect encoding"),
])  # fmt: skip
def test_dictionaries(patched: FairseqProcess, copy: Path, line: str, match: str) -> None:
    with open(copy / "dict.de.txt", "ab") as file:
        file.write(f"{line}\n".encode("utf-8", "surrogateescape"))
    files = {"prefix": str(copy / "train.de-en.de"), "dictionary": str(copy / "dict.de.txt")}
    with pytest.raises(Failure, match=match) as caught:
        patched.call(read_all, **files)
    assert caught.value.kinds[0] == "DataError" and "dict.de.txt" in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("make, match", [
    (os.mkfifo, "a device or a pipe"),
    (lambda path: path.symlink_to(path.name), "a link that leads nowhere"),
])  # fmt: skip
def test_a_dictionary_that_is_no_file(
    make: Any, match: str, patched: FairseqProcess, copy: Path
) -> None:
    path = copy / "dict.de.txt"
    path.unlink()
    make(path)
    begin = time.monotonic()
    with pytest.raises(Failure, match=match):
        patched.call(read_all, prefix="none", dictionary=str(path))
    assert time.monotonic() - begin < 60  # for a pipe fairseq waits


def test_combined_splits_are_all_checked(patched: FairseqProcess, copy: Path) -> None:
    for number in ("", "1"):
        for ending in ("bin", "idx"):
            shutil.copy(copy / f"train.de-en.de.{ending}", copy / f"train{number}.{ending}")
    assert np.fromfile(copy / "train1.bin", np.uint16).max() < WORDS
    change(copy / "train1.bin", 0, "<H", 999)
    with pytest.raises(Failure, match="train1.bin; found 999"):
        patched.call(combined, folder=str(copy))


def combined(folder: str) -> int:
    from fairseq.data import Dictionary, data_utils

    words = Dictionary.load(f"{folder}/dict.de.txt")
    return len(data_utils.load_indexed_dataset(f"{folder}/train", words, combine=True))
