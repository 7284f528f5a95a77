"""Checkpoints whose bytes are not those written, or whose sizes cannot be true."""

import zipfile

import pytest
import torch

from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.errors import CheckpointError
from spectral_fairseq.formats.opening import open_model
from tests.checkpoints.made import flipped


@pytest.fixture
def path(tmp_path):
    torch.save({"model": {"w": torch.arange(1000.0)}}, tmp_path / "checkpoint.pt")
    return tmp_path / "checkpoint.pt"


def renamed(path):
    """A byte of a name in its local header, which has 30 bytes before it, is no text."""
    with zipfile.ZipFile(path) as archive:
        (tensor,) = (one for one in archive.infolist() if one.filename.endswith("/data/0"))
    content = bytearray(path.read_bytes())
    content[tensor.header_offset + 33] = 0x90
    path.write_bytes(content)


def compressed(path):
    """Zeros that no tensor refers to grow a thousandfold."""
    with zipfile.ZipFile(path) as archive:
        content = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    content["archive/data/1"] = bytes(10_000_000)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    assert path.stat().st_size < 100_000


def overlapping(path):
    """The directory names the same bytes many times."""
    with zipfile.ZipFile(path, "a") as archive:
        largest = max(archive.filelist, key=lambda entry: entry.file_size)
        archive.filelist += [largest] * 20
        archive._didModify = True


def expanded(path, zipped=True):
    """One stored number stands for many."""
    wide = torch.ones(1).expand(10**6, 10**6)
    torch.save({"model": {"w": wide}}, path, _use_new_zipfile_serialization=zipped)


def repeated(path):
    """As in .distcp: torch reads the last one, so that one tensor of many would be the model."""
    path.write_bytes(path.read_bytes() * 2)


LARGER = "1000000 x 1000000 numbers, more than the file"
# What is wrong -> how it is made of an intact file, what is said of it, and whether only sums tell.
FAULTS = {
    "a flipped bit of a tensor": (
        lambda path: flipped(path, "data/0"),
        "data/0.*checksum.*copy it again",
        True,
    ),
    "a flipped bit of the pickle": (lambda path: flipped(path, "data.pkl"), "data.pkl", True),
    "a name that is no text": (renamed, "an intact checkpoint", True),
    "an archive that grows a thousandfold": (compressed, r"declares 10,\d+,\d+ bytes", False),
    "entries that overlap": (overlapping, "zip archive that declares", False),
    "a tensor larger than the file": (expanded, LARGER, False),
    "the same in the older format": (lambda path: expanded(path, False), LARGER, False),
    "several archives in one file": (repeated, "several archives.*dcp_to_torch", False),
}


@pytest.mark.parametrize("what", FAULTS)
def test_an_archive_with_a_fault(what, path):
    change, message, by_sums = FAULTS[what]
    change(path)
    without_sums = (lambda path: load_checkpoint(path, verify=False), open_model)
    for read in (load_checkpoint, *(() if by_sums else without_sums)):
        with pytest.raises(CheckpointError, match=message):
            read(path)


def test_a_flipped_bit_may_be_taken(path):
    flipped(path, "data/0")
    assert torch.load(path)["model"]["w"].tolist() != list(range(1000))  # torch takes it
    found = load_checkpoint(path, verify=False)["model"]["w"]
    assert (found != torch.arange(1000.0)).sum() == 1


def test_one_file_of_a_distributed_checkpoint(path):
    part = path.with_name("__0_0.distcp")
    part.write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match="a part of one.*dcp_to_torch"):
        open_model(part)


def test_the_folder_of_a_distributed_checkpoint(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointError, match="a folder without.*dcp_to_torch"):
        open_model(tmp_path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ["a.npy", "model/data.pkl"])
def test_two_entries_of_one_name(name, tmp_path):
    with zipfile.ZipFile(tmp_path / "twice.zip", "w") as archive:
        archive.writestr(name, b"one")
        archive.writestr(name, b"other")
    with pytest.raises(CheckpointError, match=f"one entry of each name.*2 of the name '{name}'"):
        open_model(tmp_path / "twice.zip")


def test_a_text_in_a_zip_archive(tmp_path):
    with zipfile.ZipFile(tmp_path / "glove.zip", "w") as archive:
        archive.writestr("glove.6B.50d.txt", "the 0.1 0.2\n")
    with pytest.raises(CheckpointError, match="1 other entries: glove.6B.50d.txt.*Unpack it"):
        open_model(tmp_path / "glove.zip")
