from __future__ import annotations

import zipfile
from pathlib import Path
from typing import List

import pytest
import torch

from spectral_fairseq.provenance import torch_release
from tests.compat.conftest import train_arguments
from tests.compat.fairseq_process import Failure, FairseqProcess
from tests.compat.test_safe_loading import Payload


def load(path: str) -> None:
    from fairseq import checkpoint_utils

    checkpoint_utils.load_checkpoint_to_cpu(path)


@pytest.fixture
def truncated(tmp_path: Path, checkpoint: Path) -> Path:
    path = tmp_path / "truncated.pt"
    path.write_bytes(checkpoint.read_bytes()[:5000])
    return path


def test_truncated(bare: FairseqProcess, patched: FairseqProcess, truncated: Path) -> None:
    with pytest.raises(Failure) as before:
        bare.call(load, path=str(truncated))
    assert str(truncated) not in before.value.message
    with pytest.raises(Failure) as after:
        patched.call(load, path=str(truncated))
    assert after.value.kinds[0] == "DamagedError"
    assert str(truncated) in after.value.message and "copy it again" in after.value.message


def test_an_archive_that_would_fill_the_memory(patched: FairseqProcess, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb/data.pkl", bytes(10_000_000))
    with pytest.raises(Failure, match="declares 10,000,000 bytes"):
        patched.call(load, path=str(tmp_path / "bomb.pt"))


def test_not_from_fairseq(bare: FairseqProcess, patched: FairseqProcess, tmp_path: Path) -> None:
    path = tmp_path / "other.pt"
    torch.save({"state_dict": {}}, path)
    with pytest.raises(Failure) as before:
        bare.call(load, path=str(path))
    assert before.value.kinds[0] == "KeyError"
    with pytest.raises(Failure, match="a fairseq checkpoint") as after:
        patched.call(load, path=str(path))
    assert after.value.kinds[0] == "NotFairseqError"


@pytest.mark.skipif(torch_release() < (2, 6), reason="this torch refuses nothing by default")
def test_foreign_globals(patched: FairseqProcess, tmp_path: Path) -> None:
    path = tmp_path / "evil.pt"
    torch.save({"model": {}, "args": Payload(tmp_path / "executed")}, path)
    with pytest.raises(Failure, match=r"object ((builtins|__builtin__)\.)?exec,") as caught:
        patched.call(load, path=str(path))
    assert caught.value.kinds[0] == "UntrustedError"
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("flag", ["--restore-file", "--finetune-from-model"])
def test_training_does_not_start(
    patched: FairseqProcess, data: Path, truncated: Path, tmp_path: Path, flag: str
) -> None:
    saved = tmp_path / "saved"
    arguments: List[str] = train_arguments(data, saved, flag, str(truncated), "--max-epoch", "1")
    with pytest.raises(Failure) as caught:
        patched.cli("fairseq_cli.train", *arguments)
    assert caught.value.kinds[0] == "DamagedError"
    assert list(saved.iterdir()) == []


def test_generation_names_the_file(patched: FairseqProcess, data: Path, truncated: Path) -> None:
    with pytest.raises(Failure, match=str(truncated)) as caught:
        patched.cli("fairseq_cli.generate", data, "--path", truncated, "--cpu")
    assert caught.value.kinds[0] == "DamagedError"
