"""Checkpoints whose bytes are not those written, or whose sizes cannot be true."""

import zipfile

import pytest
import torch

from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.errors import CheckpointError
from tests.checkpoints.made import flipped


@pytest.fixture
def path(tmp_path):
    torch.save({"model": {"w": torch.arange(1000.0)}}, tmp_path / "checkpoint.pt")
    return tmp_path / "checkpoint.pt"


def test_a_flipped_bit_of_a_tensor(path):
    flipped(path, "data/0")
    assert torch.load(path)["model"]["w"].tolist() != list(range(1000))  # torch takes it
    with pytest.raises(CheckpointError, match="data/0.*checksum.*Copy it again"):
        load_checkpoint(path)
    found = load_checkpoint(path, verify=False)["model"]["w"]
    assert (found != torch.arange(1000.0)).sum() == 1


def test_a_flipped_bit_of_the_pickle(path):
    flipped(path, "data.pkl")
    with pytest.raises(CheckpointError, match="data.pkl"):
        load_checkpoint(path)


def test_a_name_that_is_no_text(path):
    with zipfile.ZipFile(path) as archive:
        (tensor,) = (one for one in archive.infolist() if one.filename.endswith("/data/0"))
    content = bytearray(path.read_bytes())
    # In the name of the local header, which has 30 bytes before it.
    content[tensor.header_offset + 33] = 0x90
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="an intact checkpoint"):
        load_checkpoint(path)


def repacked(path, compression, zeros=0):
    """The archive with other compression, and with an entry of zeros that nothing refers to."""
    packed = path.with_name("packed.pt")
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(packed, "w") as out:
        for entry in archive.infolist():
            out.writestr(entry.filename, archive.read(entry), compression)
        if zeros:
            out.writestr("archive/data/1", bytes(zeros), compression)
    return packed


def test_a_compressed_archive_of_usual_size(path):
    packed = repacked(path, zipfile.ZIP_DEFLATED)
    assert torch.equal(load_checkpoint(packed)["model"]["w"], torch.arange(1000.0))


def test_a_compressed_archive_that_grows_a_thousandfold(path):
    packed = repacked(path, zipfile.ZIP_DEFLATED, zeros=10_000_000)
    assert packed.stat().st_size < 100_000
    for verify in (True, False):
        with pytest.raises(CheckpointError, match=r"declares 10,\d+,\d+ bytes"):
            load_checkpoint(packed, verify=verify)


def test_entries_that_overlap(path):
    """The directory names the same bytes many times."""
    with zipfile.ZipFile(path, "a") as archive:
        largest = max(archive.filelist, key=lambda entry: entry.file_size)
        archive.filelist += [largest] * 20
        archive._didModify = True
    with pytest.raises(CheckpointError, match="zip archive that declares"):
        load_checkpoint(path)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip file", "older format"])
def test_a_tensor_that_is_larger_than_the_file(tmp_path, zipped):
    path = tmp_path / "checkpoint.pt"
    wide = torch.ones(1).expand(10**6, 10**6)  # one stored number
    torch.save({"model": {"w": wide}}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="1000000 x 1000000 numbers, more than the file"):
        load_checkpoint(path)
