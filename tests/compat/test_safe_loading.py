"""Checkpoints are read without running code from them."""

import tempfile

import pytest
import torch

from spectral_fairseq.compat import Status, patching
from spectral_fairseq.compat.safe_loading import SAFE_LOADING
from spectral_fairseq.provenance import torch_release
from tests.checkpoints.made import Payload
from tests.compat.fairseq_process import Fails
from tests.compat.test_nothing_runs import PACKAGES

# From torch 2.6 on torch.load refuses by default, and fairseq asks it not to from 2025-09 on.
REFUSES = torch_release() >= (2, 6)
BARE_REFUSES = REFUSES and "weights_only=False" not in (
    PACKAGES["fairseq"] / "checkpoint_utils.py"
).read_text("utf-8")


def round_trips():
    """Save and load what fairseq's checkpoints, or its messages between workers, hold."""
    import argparse
    import io
    from collections import OrderedDict

    import numpy as np
    import torch
    from fairseq.distributed.utils import _put_tensors_in_obj, _split_tensors_from_obj
    from omegaconf import OmegaConf

    config = OmegaConf.create({"model": {"lr": [0.5, 1], "name": "x", "flag": True, "none": None}})
    contents = {
        "arguments of a legacy arch": argparse.Namespace(arch="lstm", lr=[0.5]),
        "a score as numpy number": {"best": np.float64(27.5), "n": np.int64(3)},
        "counts as numpy array": {"_bleu_counts": np.array([1, 2, 3, 4]), "f": np.ones(2, "f4")},
        "the message on resuming": _split_tensors_from_obj(
            {"cfg": config, "model": OrderedDict(w=torch.ones(2))}, []
        ),
    }
    outcomes = {}
    for name, content in contents.items():
        buffer = io.BytesIO()
        torch.save(content, buffer)
        buffer.seek(0)
        try:
            loaded = torch.load(buffer, map_location="cpu")
        except Exception as error:
            outcomes[name] = str(error)
            continue
        outcomes[name] = "loaded"
        if name == "the message on resuming":
            loaded = _put_tensors_in_obj(loaded, [torch.ones(2)])
            assert loaded["model"]["w"].tolist() == [1.0, 1.0]
            assert loaded["cfg"] == config
        else:
            assert repr(loaded) == repr(content)
    return outcomes


def test_plain_content_loads(bare, patched):
    outcomes = patched.call(round_trips)
    assert len(outcomes) == 4 and set(outcomes.values()) == {"loaded"}
    if REFUSES:
        assert all("weights only" in one.lower() for one in bare.call(round_trips).values())


def load_with_torch(path):
    import torch

    torch.load(path)


def load(path):
    from fairseq import checkpoint_utils

    checkpoint_utils.load_checkpoint_to_cpu(path)


@pytest.mark.skipif(not REFUSES, reason="this torch refuses nothing by default")
@pytest.mark.parametrize("reader, expected", [
    (load_with_torch, Fails("exec")),
    (load, Fails(r"object ((builtins|__builtin__)\.)?exec,", "UntrustedError")),
])  # fmt: skip
def test_a_foreign_object_is_refused_unexecuted(reader, expected, patched, tmp_path):
    marker = tmp_path / "executed"
    torch.save({"model": {}, "args": Payload(marker)}, tmp_path / "evil.pt")
    patched.gives(expected, reader, path=str(tmp_path / "evil.pt"))
    assert not marker.exists()


def load_without_safety(path, installed_again):
    """By fairseq's loader of 2025-09, which differs from older ones in one argument."""
    import inspect

    from fairseq import checkpoint_utils

    source = inspect.getsource(checkpoint_utils.load_checkpoint_to_cpu)
    old = 'torch.load(f, map_location=torch.device("cpu"))'
    new = 'torch.load(f, map_location=torch.device("cpu"), weights_only=False)'
    assert old in source or "weights_only=False" in source
    exec(source.replace(old, new), vars(checkpoint_utils))
    if installed_again:  # which fails where it has no effect
        from spectral_fairseq.compat.damaged_checkpoint import DAMAGED_CHECKPOINT
        from spectral_fairseq.compat.safe_loading import SAFE_LOADING

        SAFE_LOADING.install()
        DAMAGED_CHECKPOINT.install()
    checkpoint_utils.load_checkpoint_to_cpu(path)


@pytest.mark.skipif(torch_release() < (1, 13), reason="this torch.load has no weights_only")
@pytest.mark.parametrize("which", ["bare", "patched"])
def test_a_loader_that_asks_for_no_safety_gets_it(which, request, checkpoint, tmp_path):
    process, marker, evil = request.getfixturevalue(which), tmp_path / "done", tmp_path / "evil.pt"
    history = [{"num_updates": 1, "optimizer_name": "", "lr_scheduler_state": {}}]
    state = {"model": {}, "optimizer_history": history, "extra_state": {"train_iterator": None}}
    torch.save({**state, "payload": Payload(marker)}, evil)
    is_patched = which == "patched"
    expected = Fails(kind="UntrustedError") if is_patched else None
    process.gives(expected, load_without_safety, path=str(evil), installed_again=is_patched)
    assert marker.exists() is not is_patched
    process.call(load_without_safety, path=str(checkpoint), installed_again=is_patched)


def test_a_full_disk_is_no_unknown_fairseq(monkeypatch, tmp_path):
    assert "not tried" not in patching._apply(SAFE_LOADING, None).detail
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    applied = patching._apply(SAFE_LOADING, None)
    assert applied.status is Status.PATCHED
    assert "not tried, since no temporary file" in applied.detail


def a_dictionary_of_a_task(path):
    """Save the dictionary of a task as HuBERT's training does, and load it."""
    import torch
    from fairseq import checkpoint_utils
    from fairseq.data.dictionary import Dictionary

    dictionary = Dictionary()
    dictionary.add_symbol("a word")
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}}
    state = {
        "args": None,
        "cfg": {"model": {}, "task": {"_name": "hubert_pretraining"}},
        "model": {},
        "optimizer_history": [{**history, "num_updates": 3}],
        "extra_state": {"train_iterator": {"epoch": 1}},
        "task_state": {"dictionaries": [dictionary]},
    }
    torch.save(state, path)
    (kept,) = checkpoint_utils.load_checkpoint_to_cpu(path)["task_state"]["dictionaries"]
    return [type(kept) is Dictionary, len(kept), kept.index("a word")]


def test_a_dictionary_loads(bare, patched, tmp_path):
    path = str(tmp_path / "hubert.pt")
    patched.gives([True, 5, 4], a_dictionary_of_a_task, path=path)
    if BARE_REFUSES:
        bare.gives(Fails("dictionary.Dictionary"), a_dictionary_of_a_task, path=path)
