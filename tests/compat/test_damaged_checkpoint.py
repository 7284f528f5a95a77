"""Files that are no checkpoints."""

import os
import zipfile

import pytest
import torch

from tests.compat.conftest import train_arguments
from tests.compat.fairseq_process import Fails, Failure
from tests.compat.test_safe_loading import load


@pytest.fixture
def truncated(tmp_path, checkpoint):
    path = tmp_path / "truncated.pt"
    path.write_bytes(checkpoint.read_bytes()[:5000])
    return path


def test_truncated(bare, patched, truncated):
    assert str(truncated) not in bare.gives(Fails(), load, path=str(truncated)).message
    failure = patched.gives(Fails("copy it again"), load, path=str(truncated))
    assert failure.kinds[0] == "DamagedError" and str(truncated) in failure.message


def test_a_bomb_and_a_pipe(patched, tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb/data.pkl", bytes(10_000_000))
    os.mkfifo(tmp_path / "pipe.pt")
    patched.gives(Fails("declares 10,000,000 bytes"), load, path=str(tmp_path / "bomb.pt"))
    patched.gives(Fails("a device or a pipe"), load, path=str(tmp_path / "pipe.pt"))


def test_not_from_fairseq(bare, patched, tmp_path):
    path = str(tmp_path / "other.pt")
    torch.save({"state_dict": {}}, path)
    assert bare.gives(Fails(), load, path=path).kinds[0] == "KeyError"
    failure = patched.gives(Fails("a fairseq checkpoint"), load, path=path)
    assert failure.kinds[0] == "NotFairseqError"


@pytest.mark.parametrize("flag", ["--restore-file", "--finetune-from-model"])
def test_training_does_not_start(patched, data, truncated, tmp_path, flag):
    saved = tmp_path / "saved"
    arguments = train_arguments(data, saved, flag, str(truncated), "--max-epoch", "1")
    with pytest.raises(Failure) as caught:
        patched.cli("fairseq_cli.train", *arguments)
    assert caught.value.kinds[0] == "DamagedError"
    assert list(saved.iterdir()) == []
