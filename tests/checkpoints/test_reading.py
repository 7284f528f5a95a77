from __future__ import annotations

import argparse
import collections
import os
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any, Callable, Dict

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


@pytest.fixture(params=[True, False], ids=["zip file", "older format"])
def zipped(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


Saving = Callable[..., Path]


@pytest.fixture
def saved(tmp_path: Path) -> Saving:
    """Save a checkpoint, that of :func:`content` unless another is given; returns its path."""

    def save(state: Any = None, zipped: bool = True) -> Path:
        path = tmp_path / "checkpoint.pt"
        state = content() if state is None else state
        torch.save(state, path, _use_new_zipfile_serialization=zipped)
        return path

    return save


def test_what_was_saved_is_loaded(saved: Saving, zipped: bool) -> None:
    expected, loaded = content(), load_checkpoint(saved(zipped=zipped))
    assert loaded["args"] == expected["args"] and loaded["cfg"] == expected["cfg"]
    assert list(loaded["model"]) == list(expected["model"])
    for name, value in expected["model"].items():
        assert loaded["model"][name].dtype == value.dtype
        assert torch.equal(loaded["model"][name], value)
    assert loaded["extra_state"]["best"] == 1.5
    assert loaded["extra_state"]["bleu"].tolist() == [1, 2]


def test_a_checkpoint_of_fairseq_train(train: Any) -> None:
    state = load_checkpoint(train("transformer", "cross_entropy") / "checkpoint_last.pt")
    assert state["model"]["encoder.embed_tokens.weight"].shape[1] == 16
    assert state["optimizer_history"][-1]["num_updates"] == 4


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's accounts")
def test_tensors_are_mapped_from_the_file(saved: Saving, reader: str, zipped: bool) -> None:
    path = saved(zipped=zipped)
    loaded = load_checkpoint(path)
    mapped = str(path) in Path("/proc/self/maps").read_text("utf-8")
    assert mapped is (zipped and reader != "own reader")
    assert loaded["last_optimizer_state"]["state"][0]["exp_avg"].tolist() == [0, 0]


def test_neither_a_tensor_nor_its_file_changes_with_the_other(saved: Saving) -> None:
    path = saved()
    before, loaded = path.read_bytes(), load_checkpoint(path)
    load_checkpoint(path)["model"]["w"].zero_()
    assert path.read_bytes() == before
    other = path.with_name("other.pt")
    other.write_bytes(b"short")
    other.replace(path)
    assert torch.equal(loaded["model"]["w"], content()["model"]["w"])


def test_a_file_whose_name_is_no_text(saved: Saving) -> None:
    path = saved()
    named = path.rename(path.with_name(os.fsdecode(b"caf\xe9.pt")))
    assert torch.equal(load_checkpoint(named)["model"]["w"], content()["model"]["w"])


def test_a_compressed_archive(saved: Saving) -> None:
    path = saved({"model": {"w": torch.zeros(1000)}})
    packed = path.with_name("packed.pt")
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(packed, "w") as smaller:
        for entry in archive.infolist():
            smaller.writestr(entry.filename, archive.read(entry), zipfile.ZIP_DEFLATED)
    assert torch.equal(load_checkpoint(packed)["model"]["w"], torch.zeros(1000))


def test_what_has_no_end_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    for endless in (tmp_path / "pipe.pt", Path("/dev/zero")):
        with pytest.raises(CheckpointError, match="a device or a pipe"):
            load_checkpoint(endless)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_truncated(saved: Saving, share: float, zipped: bool) -> None:
    path = saved(zipped=zipped)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(CheckpointError, match=f"{path}.*truncated, damaged"):
        load_checkpoint(path)


@pytest.mark.parametrize("junk", [b"hello, world\n", bytes(range(256)) * 4, b"PK\x03\x04 no zip"])
def test_something_else(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(junk)
    with pytest.raises(CheckpointError, match="intact checkpoint") as caught:
        load_checkpoint(path)
    assert "weights_only" not in str(caught.value)


def test_foreign_globals_are_named_and_not_run(saved: Saving, tmp_path: Path, zipped: bool) -> None:
    path = saved({**content(), "extra": Payload(tmp_path / "executed")}, zipped)
    with pytest.raises(CheckpointError, match=r"object ((builtins|__builtin__)\.)?exec,"):
        load_checkpoint(path)
    assert not (tmp_path / "executed").exists()


def test_a_pickle_of_a_newer_protocol_is_refused_without_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(pickle.dumps(Payload(tmp_path / "executed"), protocol=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointError, match="could run code"):
            load_checkpoint(path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("other, match", [
    *((other, "a fairseq checkpoint") for other in ({"state_dict": {}}, {}, [1, 2])),
    ({"model": torch.ones(2)}, "a fairseq checkpoint"),
    ({"model": {"decoder": {"w": torch.ones(2)}}}, "entry 'model'.*a value of type"),
    ({"model": {1: torch.ones(2)}}, "entry 'model'.*a value of type"),
])  # fmt: skip
def test_not_from_fairseq(saved: Saving, other: Any, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(saved(other))


def test_what_modules_keep_beside_tensors_is_loaded(saved: Saving) -> None:
    model = {"a.weight": torch.ones(2), "a._extra_state": {"scale": 1.0}, "_extra_state": None}
    found = load_checkpoint(saved({"model": model}))["model"]
    assert found.keys() == model.keys() and tensors_of(found).keys() == {"a.weight"}


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
    dtype: Any, kind: str, reader: str, saved: Saving
) -> None:
    if reader != "torch's reader" or torch_release() < (2, 6):
        pytest.skip("our own reader reads them, since they only build values")
    path = saved({"model": {}, "beside": np.zeros(3, dtype=dtype)})
    with pytest.raises(CheckpointError, match=kind) as caught:
        checkpoints.read_torch_file(path)
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize("array", [np.array(["a", "bc"]), np.ones(2, complex), np.array([b"a"])])
def test_arrays_of_text_beside_the_model_are_read(array: Any, saved: Saving) -> None:
    found, _ = checkpoints.read_torch_file(saved({"model": {}, "beside": array}))
    assert found["beside"].tolist() == array.tolist()
