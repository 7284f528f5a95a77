from __future__ import annotations

import argparse
import collections
import os
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest
import torch

from spectral_fairseq.checkpoints import reading as checkpoints
from spectral_fairseq.checkpoints.reading import load_checkpoint, tensors_of
from spectral_fairseq.errors import CheckpointError
from spectral_fairseq.provenance import torch_release
from tests.checkpoints.made import Payload


@pytest.fixture(params=["torch's reader", "own reader, mapped", "own reader"], autouse=True)
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The readers of Note [Two safe readers], the second also on a new torch."""
    if request.param == "own reader":
        monkeypatch.setattr(checkpoints, "torch_release", lambda: (1, 12))
    elif torch_release() < (2, 1):
        pytest.skip("this torch maps no files")
    elif request.param == "own reader, mapped":
        monkeypatch.setattr(checkpoints, "torch_release", lambda: (2, 1))
    elif torch_release() < (2, 6):
        pytest.skip("this torch has no reader of its own that is safe")
    return str(request.param)


def content() -> Dict[str, Any]:
    return {
        "args": argparse.Namespace(arch="lstm", lr=[0.5]),
        "cfg": {"model": {"_name": "lstm"}, "none": None},
        "model": collections.OrderedDict(
            [
                ("w", torch.arange(6.0).view(2, 3)),
                ("half", torch.ones(3, dtype=torch.float16)),
                ("parameter", torch.nn.Parameter(torch.ones(2))),
                ("n", torch.tensor(3)),
            ]
        ),
        "extra_state": {"best": np.float64(1.5), "bleu": np.array([1, 2])},
        "last_optimizer_state": {"state": {0: {"step": 3, "exp_avg": torch.zeros(2)}}},
    }


@pytest.mark.parametrize("zipped", [True, False], ids=["zip file", "older format"])
def test_what_was_saved_is_loaded(tmp_path: Path, zipped: bool) -> None:
    saved = content()
    path = tmp_path / "checkpoint.pt"
    torch.save(saved, path, _use_new_zipfile_serialization=zipped)
    loaded = load_checkpoint(path)
    assert loaded["args"] == saved["args"] and loaded["cfg"] == saved["cfg"]
    assert list(loaded["model"]) == list(saved["model"])
    for name, value in saved["model"].items():
        assert loaded["model"][name].dtype == value.dtype
        assert torch.equal(loaded["model"][name], value)
    assert loaded["extra_state"]["best"] == 1.5
    assert loaded["extra_state"]["bleu"].tolist() == [1, 2]


def test_a_checkpoint_of_fairseq_train(train: Any) -> None:
    state = load_checkpoint(train("transformer", "cross_entropy") / "checkpoint_last.pt")
    assert state["model"]["encoder.embed_tokens.weight"].shape[1] == 16
    assert state["optimizer_history"][-1]["num_updates"] == 4


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's accounts")
@pytest.mark.parametrize("zipped", [True, False], ids=["zip file", "older format"])
def test_tensors_are_mapped_from_the_file(tmp_path: Path, reader: str, zipped: bool) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save(content(), path, _use_new_zipfile_serialization=zipped)
    loaded = load_checkpoint(path)
    mapped = str(path) in Path("/proc/self/maps").read_text("utf-8")
    assert mapped is (zipped and reader != "own reader")
    assert loaded["last_optimizer_state"]["state"][0]["exp_avg"].tolist() == [0, 0]


def test_changing_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save(content(), path)
    before = path.read_bytes()
    load_checkpoint(path)["model"]["w"].zero_()
    assert path.read_bytes() == before


def test_a_replaced_file_leaves_the_loaded_tensors_alone(tmp_path: Path) -> None:
    path, other = tmp_path / "checkpoint.pt", tmp_path / "other.pt"
    torch.save(content(), path)
    loaded = load_checkpoint(path)
    other.write_bytes(b"short")
    other.replace(path)
    assert torch.equal(loaded["model"]["w"], content()["model"]["w"])


def test_a_compressed_archive(tmp_path: Path) -> None:
    path, packed = tmp_path / "checkpoint.pt", tmp_path / "packed.pt"
    torch.save({"model": {"w": torch.zeros(1000)}}, path)
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(packed, "w") as smaller:
        for entry in archive.infolist():
            smaller.writestr(entry.filename, archive.read(entry), zipfile.ZIP_DEFLATED)
    assert torch.equal(load_checkpoint(packed)["model"]["w"], torch.zeros(1000))


def test_what_has_no_end_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    for endless in (tmp_path / "pipe.pt", Path("/dev/zero")):
        with pytest.raises(CheckpointError, match="a device or a pipe"):
            load_checkpoint(endless)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip file", "older format"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_truncated(tmp_path: Path, share: float, zipped: bool) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save(content(), path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(CheckpointError, match="truncated, damaged") as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("junk", [b"hello, world\n", bytes(range(256)) * 4, b"PK\x03\x04 no zip"])
def test_something_else(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(junk)
    with pytest.raises(CheckpointError, match="intact checkpoint") as caught:
        load_checkpoint(path)
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip file", "older format"])
def test_foreign_globals_are_named_and_not_run(tmp_path: Path, zipped: bool) -> None:
    marker = tmp_path / "executed"
    path = tmp_path / "checkpoint.pt"
    evil = {**content(), "extra": Payload(marker)}
    torch.save(evil, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"object ((builtins|__builtin__)\.)?exec,"):
        load_checkpoint(path)
    assert not marker.exists()


def test_a_pickle_of_a_newer_protocol_is_refused_without_a_warning(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(pickle.dumps(Payload(marker), protocol=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointError, match="could run code"):
            load_checkpoint(path)
    assert not marker.exists()


@pytest.mark.parametrize("other", [{"state_dict": {}}, {}, [1, 2], {"model": torch.ones(2)}])
def test_not_from_fairseq(tmp_path: Path, other: Any) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save(other, path)
    with pytest.raises(CheckpointError, match="a fairseq checkpoint"):
        load_checkpoint(path)


@pytest.mark.parametrize("model", [{"decoder": {"w": torch.ones(2)}}, {1: torch.ones(2)}])
def test_a_model_of_another_shape(tmp_path: Path, model: Any) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": model}, path)
    with pytest.raises(CheckpointError, match="entry 'model'.*a value of type"):
        load_checkpoint(path)


def test_what_modules_keep_beside_tensors_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    model = {"a.weight": torch.ones(2), "a._extra_state": {"scale": 1.0}, "_extra_state": None}
    torch.save({"model": model}, path)
    assert load_checkpoint(path)["model"].keys() == model.keys()
    assert tensors_of(load_checkpoint(path)["model"]).keys() == {"a.weight"}


def test_torchscript_is_refused_unopened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch before 2.6 hands it to torch.jit.load, which runs the code in it."""
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "model.pt"))
    monkeypatch.setattr(torch.jit, "load", None)
    with pytest.raises(CheckpointError, match="a TorchScript archive, which could run code"):
        load_checkpoint(tmp_path / "model.pt")
    with open(tmp_path / "model.pt", "rb") as file, pytest.raises(CheckpointError, match="code"):
        checkpoints.torch_load(file)


@pytest.mark.parametrize("dtype, kind", [(object, "ObjectDType"), ([("a", "f4")], "VoidDType")])
def test_an_intact_file_with_other_arrays_is_not_called_damaged(
    dtype: Any, kind: str, reader: str, tmp_path: Path
) -> None:
    if reader != "torch's reader" or torch_release() < (2, 6):
        pytest.skip("our own reader reads them, since they only build values")
    torch.save({"model": {}, "beside": np.zeros(3, dtype=dtype)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=kind) as caught:
        checkpoints.read_torch_file(tmp_path / "x.pt")
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize("array", [np.array(["a", "bc"]), np.ones(2, complex), np.array([b"a"])])
def test_arrays_of_text_beside_the_model_are_read(array: Any, tmp_path: Path) -> None:
    torch.save({"model": {}, "beside": array}, tmp_path / "x.pt")
    found, _ = checkpoints.read_torch_file(tmp_path / "x.pt")
    assert found["beside"].tolist() == array.tolist()
