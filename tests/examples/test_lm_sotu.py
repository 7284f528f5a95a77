"""The language-model example as a whole, on a few hundred lines of made-up text."""

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest

from spectral_fairseq.errors import ConfigurationError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
if not EXAMPLES.exists():
    pytest.skip("the examples are not beside these tests", allow_module_level=True)
FOLDER = EXAMPLES / "lm_sotu"
LINES = {"train": 300, "valid": 40, "test": 40}


@pytest.fixture
def scripts(monkeypatch):
    """The example's modules, and none of another example that are called alike."""
    monkeypatch.setattr(
        sys, "path", [str(FOLDER), str(EXAMPLES / "common"), str(EXAMPLES), *sys.path]
    )
    for name in ("methods", "compare", "run"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import compare
    import run

    import lm_experiment

    yield compare, run, lm_experiment
    for name in ("methods", "compare", "run", "lm_experiment"):
        sys.modules.pop(name, None)


@pytest.fixture
def small_text(scripts, monkeypatch):
    """``sotu.prepare`` replaced: the same files and counts, of 40 words."""
    _, _, experiment = scripts

    def prepare(folder, wheel=None):
        folder.mkdir(parents=True)
        tokens = {}
        for seed, (split, count) in enumerate(LINES.items()):
            generator = random.Random(seed)
            words = [f"w{index}" for index in range(40)]
            lines = [generator.choices(words, k=generator.randint(3, 9)) for _ in range(count)]
            tokens[split] = sum(map(len, lines))
            text = "".join(" ".join(line) + "\n" for line in lines)
            (folder / f"{split}.tokens").write_text(text, "utf-8")
        return {"lines": dict(LINES), "tokens": tokens}

    monkeypatch.setattr(experiment.sotu, "prepare", prepare)


@pytest.mark.slow
def test_methods_are_compared_once(scripts, small_text, tmp_path, monkeypatch):
    compare, _, experiment = scripts
    arguments = compare.parse_arguments(
        ["--cpu", "--seeds", "1", "--methods", "awd_lstm", "spectrum_control", "--updates", "12",
         "--dim", "8", "--hidden", "12", "--work-dir", str(tmp_path / "work")]
    )  # fmt: skip
    table = experiment.compare(arguments)
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:4]] == [
        "awd_lstm", "spectrum_control"
    ]  # fmt: skip
    assert "12 updates each" in table and "test ppl" in table

    def refuse(*_, **__):
        raise AssertionError("trained again")

    monkeypatch.setattr(experiment.LanguageModelRun, "training", refuse)
    monkeypatch.setattr(experiment.LanguageModelRun, "evaluation", refuse)
    assert experiment.compare(arguments) == table


@pytest.mark.slow
def test_one_model_from_nothing_to_all_its_perplexities(scripts, small_text, tmp_path, monkeypatch):
    _, run, experiment = scripts
    monkeypatch.setattr(
        experiment,
        "EVALUATIONS",
        {k: v for k, v in experiment.EVALUATIONS.items() if k != "dynamic"},
    )
    arguments = run.parse_arguments(
        ["--cpu", "--epochs", "1", "--fine-tuning-epochs", "1", "--dim", "8", "--hidden", "12",
         "--work-dir", str(tmp_path / "work")]
    )  # fmt: skip
    text = experiment.train_and_evaluate(arguments)
    rows = {line.split("|")[1].strip(): line.split("|")[2:4] for line in text.splitlines()[2:6]}
    assert set(rows) == {
        "Kneser-Ney trigram",
        "AWD-LSTM",
        "fine-tuned",
        "fine-tuned, continuous cache",
    }
    assert all(1 < float(cell) < 200 for row in rows.values() for cell in row)
    assert rows["AWD-LSTM"] != rows["fine-tuned"] != rows["fine-tuned, continuous cache"]


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("compare", "--updates"),
        ("compare", "--hidden"),
        ("run", "--epochs"),
        ("run", "--fine-tuning-epochs"),
        ("run", "--dim"),
        ("compare", "--at-once"),
        ("run", "--tune-tokens"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_before_anything_is_written(
    scripts, tmp_path, command, flag
):
    compare, run, experiment = scripts
    script, action = {
        "compare": (compare, experiment.compare),
        "run": (run, experiment.train_and_evaluate),
    }[command]
    work = tmp_path / "work"
    arguments = script.parse_arguments(["--cpu", flag, "0", "--work-dir", str(work)])
    with pytest.raises(ConfigurationError, match=f"{flag} of at least 1"):
        action(arguments)
    assert not work.exists()


def test_a_search_on_other_words_is_not_taken_for_this_one(scripts, tmp_path, monkeypatch):
    _, run, experiment = scripts

    def start(*more):
        experiment.train_and_evaluate(
            run.parse_arguments(["--cpu", "--dim", "8", "--work-dir", str(tmp_path), *more])
        )

    class Stopped(Exception):
        pass

    def stop(*_):
        raise Stopped

    monkeypatch.setattr(experiment, "PreparedText", stop)
    with pytest.raises(Stopped):
        start("--tune-tokens", "500")
    with pytest.raises(ConfigurationError, match="tune_tokens 500 -> 10000"):
        start()
    before = json.loads((tmp_path / "settings.json").read_text("utf-8"))
    del before["tune_tokens"]  # as older folders are
    (tmp_path / "settings.json").write_text(json.dumps(before), "utf-8")
    with pytest.raises(ConfigurationError, match="tune_tokens 10000 -> 500"):
        start("--tune-tokens", "500")
    with pytest.raises(Stopped):
        start()


def test_packages_for_translations_are_not_asked_for(scripts, tmp_path, monkeypatch):
    compare, _, experiment = scripts
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("sentencepiece", "sacrebleu") else find_spec(name),
    )
    with pytest.raises(ConfigurationError, match="--updates"):
        experiment.compare(compare.parse_arguments(["--updates", "0", "--work-dir", str(tmp_path)]))
