from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest

from spectral_fairseq.errors import MissingDataError
from tests.compat.conftest import train_arguments
from tests.compat.fairseq_process import Failure, FairseqProcess


def train(process: FairseqProcess, data: Path, save_dir: Path, *more: str) -> Failure:
    with pytest.raises(Failure) as caught:
        process.cli("fairseq_cli.train", *train_arguments(data, save_dir, *more))
    return caught.value


@pytest.fixture
def copy(data: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(data, tmp_path / "copy"))


def test_missing_folder(bare: FairseqProcess, patched: FairseqProcess, tmp_path: Path) -> None:
    missing = tmp_path / "none"
    for more in ([], ["-s", "de", "-t", "en"]):
        before = train(bare, missing, tmp_path, *more)
        assert before.kinds[0] == "FileNotFoundError" and "fairseq-preprocess" not in before.message
        after = train(patched, missing, tmp_path, *more)
        assert after.kinds[0] == "MissingDataError" and "FileNotFoundError" in after.kinds
        assert f"{missing}; found no such folder" in after.message
        assert "fairseq-preprocess" in after.message
    after = train(patched, missing, tmp_path, "--task", "language_modeling")
    assert "found no such folder" in after.message


def test_folder_without_data(patched: FairseqProcess, tmp_path: Path) -> None:
    found = train(patched, tmp_path, tmp_path)
    assert found.kinds[0] == "DataError" and "--source-lang" in found.message


def test_missing_dictionary(patched: FairseqProcess, copy: Path, tmp_path: Path) -> None:
    (copy / "dict.en.txt").unlink()
    found = train(patched, copy, tmp_path)
    assert found.kinds[0] == "MissingDataError"
    assert f"a dictionary at {copy / 'dict.en.txt'}; found no such file" in found.message


def test_malformed_dictionary(
    bare: FairseqProcess, patched: FairseqProcess, copy: Path, tmp_path: Path
) -> None:
    (copy / "dict.en.txt").write_text("w1 many\n")
    assert "dict.en.txt" not in train(bare, copy, tmp_path).message
    found = train(patched, copy, tmp_path)
    assert found.kinds[0] == "DataError"
    assert "dict.en.txt" in found.message and "token" in found.message


def test_missing_split(patched: FairseqProcess, data: Path, tmp_path: Path) -> None:
    found = train(patched, data, tmp_path, "--valid-subset", "dev", "--ignore-unused-valid-subsets")
    assert found.kinds[0] == "MissingDataError" and "'dev'" in found.message


def test_the_error_crosses_processes() -> None:
    error = MissingDataError("a", "b", "C.")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is MissingDataError and str(copy) == str(error) == "expected a; found b. C."
