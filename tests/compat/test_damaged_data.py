"""Binarised data that are cut, of another format, or of another dictionary."""

import os
import shutil
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from spectral_fairseq.compat.indexed_files import check_indexed_files
from spectral_fairseq.errors import DataError
from tests.compat.fairseq_process import Fails

WORDS = 24  # of the dictionary of the fixture `data`


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def change(path, place, form, value):
    content = bytearray(path.read_bytes())
    struct.pack_into(form, content, place, value)
    path.write_bytes(bytes(content))


def replaced_by_pipe(path):
    path.unlink()
    os.mkfifo(path)


def without_sentences(path):
    path.write_bytes(path.read_bytes()[:18] + bytes(8))


# How a split's file is damaged, and what the error says. The header of an index has 26 bytes.
BIN_OF_ANOTHER = f"the {WORDS} words of the dictionary in .*; found {WORDS}"
DAMAGES = {
    "bin cut": (cut, (101,), "within the 101 bytes"),
    "bin empty": (cut, (0,), "within the 0 bytes"),
    "bin missing": (Path.unlink, (), "both files of the split"),
    "bin a pipe": (replaced_by_pipe, (), "a device or a pipe"),
    "bin of another dictionary": (change, (4, "<H", WORDS), BIN_OF_ANOTHER),
    "idx cut": (cut, (333,), "333 bytes with a wrong header or length"),
    "idx cut in the header": (cut, (12,), "12 bytes with a wrong header or length"),
    "idx empty": (cut, (0,), "the first bytes b''"),
    "idx of bad magic": (change, (0, "<B", 0), "an index of fairseq-preproc"),
    "idx of another version": (change, (9, "<Q", 2), "header or length"),
    "idx of floats": (change, (17, "<B", 7), "header or length"),
    "idx of huge count": (change, (18, "<Q", 2**62), "header or length"),
    "idx of negative length": (change, (26, "<i", -5), "negative length"),
    "idx of huge length": (change, (26, "<i", 2**30), "that ends at byte"),
    "idx of negative place": (change, (-8, "<q", -2), "negative length"),
    "idx without sentences": (without_sentences, (), "at least one sentence"),
}


def read_all(prefix, dictionary):
    """Open a split as tasks do, and look up every token."""
    import torch
    from fairseq.data import Dictionary, data_utils

    words = Dictionary.load(dictionary)
    split = data_utils.load_indexed_dataset(prefix, words)
    table = torch.zeros(len(words), 1)
    return sum(len(table[split[number]]) for number in range(len(split)))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(damage, copy):
    apply, values, match = DAMAGES[damage]
    prefix, ending = str(copy / "train.de-en.de"), damage[:3]
    check_indexed_files(prefix, WORDS)
    apply(Path(f"{prefix}.{ending}"), *values)
    with pytest.raises(DataError, match=match) as caught:
        check_indexed_files(prefix, WORDS)
    assert f"train.de-en.de.{ending}" in str(caught.value)


@pytest.mark.parametrize("damage", ["bin cut", "bin of another dictionary", "idx cut"])
def test_a_task_that_opens_it_is_told(damage, bare, patched, copy):
    apply, values, match = DAMAGES[damage]
    files = {"prefix": str(copy / "train.de-en.de"), "dictionary": str(copy / "dict.de.txt")}
    assert patched.call(read_all, **files) > 500
    apply(copy / f"train.de-en.de.{damage[:3]}", *values)
    assert "DataError" not in bare.gives(Fails(), read_all, **files).kinds
    patched.gives(Fails(match, "DataError"), read_all, **files)


def older_format(prefix, sentences):
    """Write a split as fairseq did before --dataset-impl mmap."""
    from fairseq.data.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    for sentence in sentences:
        builder.add_item(sentence)
    builder.data_offsets = [int(offset) for offset in builder.data_offsets]
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("ending, apply, values", [
    ("bin", cut, (5,)),
    ("idx", cut, (90,)),
    ("idx", change, (32, "<Q", 2**61)),  # the header
    ("idx", change, (80, "<q", 2**40)),  # offsets
    ("bin", change, (0, "<i", 0)),  # a token
])  # fmt: skip
def test_the_older_format(ending, apply, values, tmp_path):
    prefix = tmp_path / "train"
    older_format(prefix, [torch.tensor([4, 9, 2]), torch.tensor([5, 2])])
    check_indexed_files(str(prefix), 10)
    with pytest.raises(DataError, match="found 9"):
        check_indexed_files(str(prefix), 9)
    apply(Path(f"{prefix}.{ending}"), *values)
    with pytest.raises(DataError, match=str(prefix)):
        check_indexed_files(str(prefix), 10)


@pytest.mark.parametrize("line, match", [
    (f"w -{2**63}", f"-{2**63} of 'w'"),
    (f"w {2**63}", f"{2**63} of 'w'"),
    ("w \u00b2", "Incorrect dictionary format"),
    ("w " + "9" * 5000, "Incorrect dictionary format|9999 of 'w'|99999"),
    ("w7011", "Incorrect dictionary format.*w7011"),
    ("w0 1", "Duplicate word"),
    ("\udcff 1", "Incorrect encoding"),
])  # fmt: skip
def test_dictionaries(patched, copy, line, match):
    with open(copy / "dict.de.txt", "ab") as file:
        file.write(f"{line}\n".encode("utf-8", "surrogateescape"))
    files = {"prefix": str(copy / "train.de-en.de"), "dictionary": str(copy / "dict.de.txt")}
    failure = patched.gives(Fails(match), read_all, **files)
    assert failure.kinds[0] == "DataError" and "dict.de.txt" in failure.message
    assert "\n" not in failure.message


def test_a_dictionary_of_scores(bare, patched, copy):
    """Ranks from 0 downwards stand in the vocabulary of sentencepiece's BPE, and harm nobody."""
    path = copy / "dict.de.txt"
    symbols = [line.split()[0] for line in path.read_text("utf-8").splitlines()]
    path.write_text("".join(f"{one} -{rank}\n" for rank, one in enumerate(symbols)), "utf-8")
    files = {"prefix": str(copy / "train.de-en.de"), "dictionary": str(path)}
    assert patched.call(read_all, **files) == bare.call(read_all, **files) > 500


def load_from_a_store(path):
    """Load a dictionary that ioPath knows how to fetch."""
    from types import SimpleNamespace

    from fairseq import file_io
    from fairseq.data import Dictionary

    handlers = {"store://": None}
    fetch = SimpleNamespace(
        _path_handlers=handlers, get_local_path=lambda one: one[len("store://") :]
    )
    file_io.IOPathManager, kept = fetch, file_io.IOPathManager
    try:
        return len(Dictionary.load(f"store://{path}"))
    finally:
        file_io.IOPathManager = kept


def test_a_dictionary_in_a_store(patched, data):
    assert patched.call(load_from_a_store, path=str(data / "dict.de.txt")) == WORDS


@pytest.mark.parametrize("make, match", [
    (os.mkfifo, "a device or a pipe"),
    (lambda path: path.symlink_to(path.name), "a link that leads nowhere"),
])  # fmt: skip
def test_a_dictionary_that_is_no_file(make, match, patched, copy):
    path = copy / "dict.de.txt"
    path.unlink()
    make(path)
    begin = time.monotonic()
    patched.gives(Fails(match), read_all, prefix="none", dictionary=str(path))
    assert time.monotonic() - begin < 60  # for a pipe fairseq waits


def test_a_dictionary_from_the_shell(bare, patched, copy):
    """As ``--srcdict <(...)`` gives one: a pipe that has its writer."""
    words = (copy / "dict.de.txt").read_bytes()
    found = []
    for process in (bare, patched):
        reading, writing = os.pipe()
        os.write(writing, words)
        os.close(writing)
        try:
            found.append(process.call(count_words, path=f"/proc/{os.getpid()}/fd/{reading}"))
        finally:
            os.close(reading)
    assert found == [WORDS, WORDS]


def count_words(path):
    from fairseq.data import Dictionary

    return len(Dictionary.load(path))


def combined(folder):
    from fairseq.data import Dictionary, data_utils

    words = Dictionary.load(f"{folder}/dict.de.txt")
    return len(data_utils.load_indexed_dataset(f"{folder}/train", words, combine=True))


def test_combined_splits_are_all_checked(patched, copy):
    for number in ("", "1"):
        for ending in ("bin", "idx"):
            shutil.copy(copy / f"train.de-en.de.{ending}", copy / f"train{number}.{ending}")
    assert np.fromfile(copy / "train1.bin", np.uint16).max() < WORDS
    change(copy / "train1.bin", 0, "<H", 999)
    patched.gives(Fails("train1.bin; found 999"), combined, folder=str(copy))
