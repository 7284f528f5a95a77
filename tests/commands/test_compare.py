"""``spectral-fairseq compare``: side by side, and one run over its saved epochs."""

import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.checkpoints.made import cone, entries, save, with_padding


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for epoch in (1, 2, 10):
        weight = with_padding(cone(spread=1 / epoch))
        save(folder / f"checkpoint{epoch}.pt", entries(weight, "svd"), updates=100 * epoch)
    save(folder / "checkpoint_last.pt", entries(with_padding(cone())), updates=1000)
    return folder


@pytest.fixture
def compared(command):
    """The figures of checkpoints beside each other, as JSON, and their labels."""

    def run(*argv):
        found = json.loads(command("compare", *argv, "--format", "json"))
        return found, [one["label"] for one in found["checkpoints"]]

    return run


@pytest.mark.slow
def test_a_run_over_its_epochs(run_folder, tmp_path, compared):
    pytest.importorskip("matplotlib")
    out = tmp_path / "report"
    found, labels = compared(run_folder, "--out", out)
    assert found["command"] == "compare"
    assert labels == ["checkpoint1", "checkpoint2", "checkpoint10"]
    cosines = [one["measures"]["mean_cosine"] for one in found["checkpoints"]]
    assert cosines == sorted(cosines)  # each is a narrower cone
    assert (out / "history.png").exists()
    assert "One run over its checkpoints" in (out / "report.html").read_text("utf-8")


def test_files_side_by_side(run_folder, command):
    paths = [run_folder / name for name in ("checkpoint1.pt", "checkpoint_last.pt")]
    text = command("compare", *paths)
    headers = "checkpoint1 checkpoint_last random table".split()
    assert headers in [line.split() for line in text.splitlines()]
    assert "IsoScore" not in text and len(text.splitlines()) <= 40
    text = command("compare", *paths, "--all")
    (line,) = [line for line in text.splitlines() if "||U'U - I||_F" in line]
    assert line.split()[-1] == "–"


def test_a_run_of_the_trainer_of_transformers(tmp_path, compared):
    for step in (100, 20, 3):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        torch.save({"lm_head.weight": cone(spread=1 / step)}, folder / "pytorch_model.bin")
        (folder / "trainer_state.json").write_text(f'{{"epoch": 0.5, "global_step": {step}}}')
    found, labels = compared(tmp_path)
    assert labels == ["checkpoint-3", "checkpoint-20", "checkpoint-100"]
    assert [one["progress"]["updates"] for one in found["checkpoints"]] == [3, 20, 100]


@pytest.mark.parametrize("name, said", [
    ("checkpoint1.pt", "at least two"), ("model", "at least two"),
    ("empty", "at least one checkpoint<epoch>.pt"),
])  # fmt: skip
def test_nothing_to_compare(name, said, run_folder, command):
    (run_folder / "empty").mkdir()
    (run_folder / "model").mkdir()
    torch.save({"lm_head.weight": cone()}, run_folder / "model" / "pytorch_model.bin")
    assert said in command("compare", run_folder / name, rc=2)


@pytest.mark.parametrize(
    "argv",
    [("compare",), ("average", "--last", "2", "--output", "out.pt")],
    ids=lambda argv: argv[0],
)
def test_a_folder_that_may_not_be_listed(argv, run_folder, command, monkeypatch):
    with monkeypatch.context() as patch:
        for owner, name in ((os, "listdir"), (Path, "iterdir")):
            patch.setattr(owner, name, Mock(side_effect=PermissionError("no right to list it")))
        said = command(*argv, run_folder, rc=2)
    assert "a folder of checkpoints at" in said and "no right to list it" in said


def test_a_folder_with_a_model_and_its_checkpoints(tmp_path, compared):
    """As after trainer.save_model(): alone it is a run, and beside others it is a model."""
    for name in ("a", "a/checkpoint-3", "a/checkpoint-20", "b"):
        (tmp_path / name).mkdir()
        torch.save({"lm_head.weight": cone()}, tmp_path / name / "pytorch_model.bin")
    assert compared(tmp_path / "a")[1] == ["checkpoint-3", "checkpoint-20"]
    assert compared(tmp_path / "a", tmp_path / "b")[1] == ["a", "b"]
