"""The table of fairseq's models: what is in it, and how two sides are compared."""

import json

import pytest

pytest.importorskip("fairseq_cli.train")

from studies.matrix import architectures  # noqa: E402
from studies.matrix.architectures import COMMANDS, MODELS, NOT_TRIED, compared  # noqa: E402


def cell(passed=True, prints=("loss 2.5",)):
    return {"passed": passed, "says": "", "prints": list(prints)}


def test_every_model_of_fairseq_is_tried_or_left_out_with_a_reason():
    assert architectures.untried() == []
    assert all(NOT_TRIED.values())


def test_the_record_has_every_model_and_no_cell_that_is_worse():
    table = json.loads(architectures.RECORD.read_text("utf-8"))["table"]
    assert set(table) == set(MODELS)
    assert all(tuple(cells) == COMMANDS for cells in table.values())
    assert {word for cells in table.values() for word in cells.values()} <= {
        *("both", "plugin", "neither")
    }


def test_the_page_has_the_record():
    record = json.loads(architectures.RECORD.read_text("utf-8"))
    assert "\n".join(architectures.rows(record)) in architectures.PAGE.read_text("utf-8")


@pytest.mark.parametrize("bare, plugin, word", [
    (cell(), cell(), "both"),
    (cell(), cell(prints=["loss 2.5001", "spectrum 1"]), "both"),
    (cell(), cell(prints=["loss 2.6"]), "differs"),
    (cell(prints=["loss 2.5", "H-0 a b"]), cell(), "differs"),
    (cell(), cell(passed=False), "bare"),
    (cell(), None, "bare"),
    (cell(passed=False), cell(), "plugin"),
    (None, None, "neither"),
])  # fmt: skip
def test_the_words_of_a_cell(bare, plugin, word):
    sides = [{"train": side} if side else {} for side in (bare, plugin)]
    assert compared(*sides) == {**dict.fromkeys(COMMANDS, "neither"), "train": word}


def test_data_that_a_killed_run_has_left_are_made_anew(tmp_path, monkeypatch):
    made = []

    def make(folder):
        (folder / "speech").mkdir()
        made.append(folder)
        if len(made) == 1:
            raise KeyboardInterrupt

    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.setattr(architectures, "make_data", make)
    monkeypatch.setattr(architectures, "run_model", lambda *_: {})
    monkeypatch.setattr(architectures, "write", lambda _: None)
    monkeypatch.setattr(architectures, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(architectures, "versions", lambda: {"fairseq": "", "torch": ""})
    argv = ["transformer", "--work-dir", str(tmp_path / "work")]
    with pytest.raises(KeyboardInterrupt):
        architectures.main(argv)
    assert architectures.main(argv) == architectures.main(argv) == 0
    assert len(made) == 2


def test_a_model_that_cannot_be_trained_ends_no_run(tmp_path, monkeypatch):
    broken = MODELS["transformer"]._replace(flags="--encoder-layers many")
    monkeypatch.setitem(architectures.MODELS, "broken", broken)
    found = architectures.run_model("broken", tmp_path, tmp_path / "save", 60, plugin=False)
    assert list(found) == ["train"] and not found["train"]["passed"]
    assert "invalid int value: 'many'" in found["train"]["says"]
