from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch

from spectral_fairseq.provenance import torch_release
from tests.compat.conftest import train_arguments
from tests.compat.fairseq_process import Failure, FairseqProcess, environment
from tests.compat.test_literal_settings import PACKAGES


def round_trips() -> Dict[str, str]:
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


def test_plain_content_loads(bare: FairseqProcess, patched: FairseqProcess) -> None:
    outcomes = patched.call(round_trips)
    assert len(outcomes) == 4 and set(outcomes.values()) == {"loaded"}
    if torch_release() >= (2, 6):
        assert all("weights only" in one.lower() for one in bare.call(round_trips).values())


def load(path: str) -> None:
    import torch

    torch.load(path)


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.marker)!r}, 'w')",)


@pytest.mark.skipif(torch_release() < (2, 6), reason="this torch refuses nothing by default")
def test_the_safety_stays_on(patched: FairseqProcess, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    torch.save({"model": {}, "args": Payload(marker)}, tmp_path / "evil.pt")
    with pytest.raises(Failure, match="exec"):
        patched.call(load, path=str(tmp_path / "evil.pt"))
    assert not marker.exists()


_LOADER_OF_2025_09 = """
import inspect, json, sys
from fairseq import checkpoint_utils

# fairseq's source of 2025-09 differs from older ones in this argument.
source = inspect.getsource(checkpoint_utils.load_checkpoint_to_cpu)
old = 'torch.load(f, map_location=torch.device("cpu"))'
new = 'torch.load(f, map_location=torch.device("cpu"), weights_only=False)'
assert old in source or "weights_only=False" in source
exec(source.replace(old, new), vars(checkpoint_utils))

if sys.argv[1] == "patched":
    from spectral_fairseq.commands import doctor
    found = doctor.diagnose()["patches"]["defects"]
    print(json.dumps({one["name"]: one for one in found}["safe loading"]))
for path in sys.argv[2:]:
    try:
        checkpoint_utils.load_checkpoint_to_cpu(path)
    except Exception as error:
        print(type(error).__name__)
    else:
        print("loaded")
"""


def in_fairseq_of_2025_09(kind: str, *paths: Path) -> List[str]:
    done = subprocess.run(
        [sys.executable, "-c", _LOADER_OF_2025_09, kind, *map(str, paths)],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(torch_release() < (1, 13), reason="this torch.load has no weights_only")
def test_a_loader_that_asks_for_no_safety_gets_it(checkpoint: Path, tmp_path: Path) -> None:
    marker, evil = tmp_path / "executed", tmp_path / "evil.pt"
    history = [{"num_updates": 1, "optimizer_name": "", "lr_scheduler_state": {}}]
    state = {"model": {}, "optimizer_history": history, "extra_state": {"train_iterator": None}}
    torch.save({**state, "payload": Payload(marker)}, evil)
    assert in_fairseq_of_2025_09("bare", evil, checkpoint) == ["loaded", "loaded"]
    assert marker.exists()
    marker.unlink()
    report, *outcomes = in_fairseq_of_2025_09("patched", evil, checkpoint)
    assert outcomes == ["UntrustedError", "loaded"] and not marker.exists()
    assert json.loads(report)["status"] == "patched"


def test_fairseq_waits_for_no_pipe(patched: FairseqProcess, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(Failure, match="a device or a pipe"):
        patched.call(load_with_fairseq, path=str(tmp_path / "pipe.pt"))


def load_with_fairseq(path: str) -> None:
    from fairseq import checkpoint_utils

    checkpoint_utils.load_checkpoint_to_cpu(path)


def updates_in(path: str) -> int:
    from fairseq import checkpoint_utils

    state = checkpoint_utils.load_checkpoint_to_cpu(path)
    return int(state["optimizer_history"][-1]["num_updates"])


def test_training_resumes_after_eval_bleu(
    bare: FairseqProcess, patched: FairseqProcess, data: Path, tmp_path: Path
) -> None:
    bleu = ["--eval-bleu", "--eval-bleu-args", '{"beam": 1, "max_len_b": 3}']
    bleu += ["--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric"]
    for epochs, updates in (("1", 13), ("2", 26)):
        arguments = train_arguments(data, tmp_path, "--max-epoch", epochs, *bleu)
        patched.cli("fairseq_cli.train", *arguments)
        assert patched.call(updates_in, path=str(tmp_path / "checkpoint_last.pt")) == updates
    loader = PACKAGES["fairseq"] / "checkpoint_utils.py"
    # Upstream asks for it from 2025-09 on.
    if torch_release() >= (2, 6) and "weights_only=False" not in loader.read_text("utf-8"):
        with pytest.raises(Failure, match="weights_only|Weights only"):
            bare.call(updates_in, path=str(tmp_path / "checkpoint_last.pt"))


def hubert_with_its_dictionary(path: str) -> List[Any]:
    """Save a small HuBERT as its training does, and load it with its task."""
    import torch
    from fairseq import checkpoint_utils
    from fairseq.data.dictionary import Dictionary
    from fairseq.models.hubert.hubert import HubertConfig, HubertModel
    from fairseq.tasks.hubert_pretraining import HubertPretrainingConfig

    dictionary = Dictionary()
    for number in range(20):
        dictionary.add_symbol(str(number))
    small = {"encoder_embed_dim": 16, "encoder_ffn_embed_dim": 16, "encoder_attention_heads": 2}
    convolutions = {"conv_feature_layers": "[(8, 10, 5)]", "conv_pos": 4, "conv_pos_groups": 2}
    model = HubertConfig(encoder_layers=1, final_dim=8, label_rate=50, **small, **convolutions)
    task = HubertPretrainingConfig(data="/missing", labels=["km"], label_rate=50)
    sections = ("common", "dataset", "optimization", "checkpoint", "distributed_training")
    state = {
        "args": None,
        "cfg": {
            "model": {**vars(model), "_name": "hubert"},
            "task": {**vars(task), "_name": "hubert_pretraining"},
            "criterion": {"_name": "hubert"},
            **{name: {} for name in sections},
        },
        "model": HubertModel(model, task, [dictionary]).state_dict(),
        "optimizer_history": [
            {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 3}
        ],
        "extra_state": {"train_iterator": {"epoch": 1}},
        "task_state": {"dictionaries": [dictionary]},
    }
    state["cfg"]["model"]["layer_type"] = "transformer"
    torch.save(state, path)
    models, _, loaded = checkpoint_utils.load_model_ensemble_and_task([path])
    kept = loaded.dictionaries[0]
    return [type(kept) is Dictionary, len(kept), kept.index("3"), models[0].num_classes]


def test_hubert_loads_with_its_dictionary(
    bare: FairseqProcess, patched: FairseqProcess, tmp_path: Path
) -> None:
    path = str(tmp_path / "hubert.pt")
    assert patched.call(hubert_with_its_dictionary, path=path) == [True, 24, 7, [24]]
    loader = PACKAGES["fairseq"] / "checkpoint_utils.py"
    if torch_release() >= (2, 6) and "weights_only=False" not in loader.read_text("utf-8"):
        with pytest.raises(Failure, match="dictionary.Dictionary"):
            bare.call(hubert_with_its_dictionary, path=path)
