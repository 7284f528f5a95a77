"""Checkpoints whose bytes are not those written, or whose sizes cannot be true."""

import zipfile

import pytest
import torch

from spectral_fairseq.checkpoints.opening import open_model
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
    with pytest.raises(CheckpointError, match="data/0.*checksum.*copy it again"):
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


def test_a_compressed_archive_that_grows_a_thousandfold(path):
    packed = path.with_name("packed.pt")
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(packed, "w") as out:
        for entry in archive.infolist():
            out.writestr(entry.filename, archive.read(entry), zipfile.ZIP_DEFLATED)
        out.writestr("archive/data/1", bytes(10_000_000), zipfile.ZIP_DEFLATED)  # of no tensor
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


def test_several_archives_in_one_file(path):
    """As in .distcp: torch reads the last one, so that one tensor of many would be the model."""
    whole = path.with_name("several.pt")
    whole.write_bytes(path.read_bytes() * 2)
    for read in (load_checkpoint, open_model):
        with pytest.raises(CheckpointError, match="several archives.*dcp_to_torch"):
            read(whole)


def test_one_file_of_a_distributed_checkpoint(path):
    part = path.with_name("__0_0.distcp")
    part.write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match="a part of one.*dcp_to_torch"):
        open_model(part)


def test_the_folder_of_a_distributed_checkpoint(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointError, match="a folder of torch.distributed.checkpoint"):
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
