"""``spectral-fairseq compare``: side by side, and one run over its saved epochs."""

import json

import pytest
import torch

from spectral_fairseq.commands.main import main
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


@pytest.mark.slow
def test_a_run_over_its_epochs(run_folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "report"
    assert main(["compare", str(run_folder), "--out", str(out), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["command"] == "compare"
    assert [one["label"] for one in found["checkpoints"]] == [
        "checkpoint1",
        "checkpoint2",
        "checkpoint10",
    ]
    cosines = [one["measures"]["mean_cosine"] for one in found["checkpoints"]]
    assert cosines == sorted(cosines)  # each is a narrower cone
    assert (out / "history.png").exists()
    assert "One run over its checkpoints" in (out / "report.html").read_text("utf-8")


def test_files_side_by_side(run_folder, capsys):
    paths = [str(run_folder / name) for name in ("checkpoint1.pt", "checkpoint_last.pt")]
    assert main(["compare", *paths, "--labels", "svd,plain"]) == 0
    text = capsys.readouterr().out
    assert ["svd", "plain"] in [line.split() for line in text.splitlines()]
    assert "linear CKA" in text and "IsoScore" not in text and len(text.splitlines()) <= 40
    assert main(["compare", *paths, "--all"]) == 0
    text = capsys.readouterr().out
    (line,) = [line for line in text.splitlines() if "||U'U - I||_F" in line]
    assert line.split()[-1] == "–"


@pytest.mark.slow
def test_drift_and_seeds_of_a_method(run_folder, capsys):
    paths = [str(run_folder / f"checkpoint{epoch}.pt") for epoch in (1, 2, 10)]
    assert main(["compare", *paths, "--methods", "a,b,b", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first, second, _ = found["checkpoints"]
    assert first["drift"] is None and first["measures"].get("drift_cka") is None
    assert second["drift"] == {"from": "checkpoint1", "words": 60}
    # The same directions at half the spread: equal up to shift and scale.
    assert second["measures"]["drift_cka"] == pytest.approx(1, abs=1e-4)
    cosines = [one["measures"]["mean_cosine"] for one in found["checkpoints"]]
    seeds = found["methods"][1]["measures"]["mean_cosine"]
    assert seeds["mean"] == pytest.approx((cosines[1] + cosines[2]) / 2)
    assert main(["compare", *paths, "--methods", "a,b,b"]) == 0
    text = capsys.readouterr().out
    (line,) = [
        line for line in text.splitlines() if line.startswith("mean cosine ") and "±" in line
    ]
    assert f"{seeds['mean']:.4g} ± {seeds['std']:.2g}" in line
    assert main(["compare", *paths, "--methods", "a,b"]) == 2
    assert "--methods" in capsys.readouterr().err


def test_a_run_of_the_trainer_of_transformers(tmp_path, capsys):
    for step in (100, 20, 3):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        torch.save({"lm_head.weight": cone(spread=1 / step)}, folder / "pytorch_model.bin")
        (folder / "trainer_state.json").write_text(f'{{"epoch": 0.5, "global_step": {step}}}')
    assert main(["compare", str(tmp_path), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [one["label"] for one in found] == ["checkpoint-3", "checkpoint-20", "checkpoint-100"]
    assert [one["progress"]["updates"] for one in found] == [3, 20, 100]


@pytest.mark.parametrize("names", [["checkpoint1.pt"], ["empty"]])
def test_nothing_to_compare(names, run_folder, capsys):
    (run_folder / "empty").mkdir()
    assert main(["compare", *(str(run_folder / name) for name in names)]) == 2
    error = capsys.readouterr().err
    assert "at least two" in error or "at least one checkpoint<epoch>.pt" in error


def test_a_folder_with_a_model_and_its_checkpoints(tmp_path, capsys):
    """As after trainer.save_model(): alone it is a run, and beside others it is a model."""
    for name in ("a", "a/checkpoint-3", "a/checkpoint-20", "b"):
        (tmp_path / name).mkdir()
        torch.save({"lm_head.weight": cone()}, tmp_path / name / "pytorch_model.bin")
    for folders, labels in ((["a"], ["checkpoint-3", "checkpoint-20"]), (["a", "b"], ["a", "b"])):
        paths = [str(tmp_path / name) for name in folders]
        assert main(["compare", *paths, "--format", "json"]) == 0
        found = json.loads(capsys.readouterr().out)["checkpoints"]
        assert [one["label"] for one in found] == labels
