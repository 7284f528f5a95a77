"""The language-model example as a whole, on a few hundred lines of made-up text."""

import importlib.util
import json
import random

import pytest

from spectral_fairseq.errors import ConfigurationError, DataError
from studies import bottleneck, own_text, sotu, sotu_comparison
from studies.language_models import LanguageModelRun, PreparedText
from studies.work_folder import WorkDir
from studies.workers import Workers

LINES = {"train": 300, "valid": 40, "test": 40}


def write_text(folder):
    """A corpus of 40 words."""
    for seed, (split, count) in enumerate(LINES.items()):
        generator = random.Random(seed)
        words = [f"w{index}" for index in range(40)]
        lines = [generator.choices(words, k=generator.randint(3, 9)) for _ in range(count)]
        text = "".join(" ".join(line) + "\n" for line in lines)
        (folder / f"{split}.tokens").write_text(text, "utf-8")


@pytest.fixture
def small_text(tmp_path_factory, monkeypatch):
    """``sotu.prepare`` replaced: the same files and counts, of 40 words."""
    source = tmp_path_factory.mktemp("messages")
    write_text(source)
    monkeypatch.setattr(
        sotu.sotu_corpus, "prepare", lambda folder, wheel: own_text.prepare(folder, source)
    )


def test_a_text_that_is_shorter_than_an_update(tmp_path):
    """Progress was divided by zero."""
    settings = sotu.settings_of(sotu_comparison.parse_arguments(["--cpu"]), 1, 1, 5)
    data = PreparedText(WorkDir(tmp_path), None, None)
    run = LanguageModelRun("awd_lstm 1", (), settings, data, tmp_path / "run", tokens=10)
    assert run.training().total == 1


@pytest.mark.slow
@pytest.mark.usefixtures("small_text", "forked_commands")
def test_methods_are_compared_once(tmp_path, monkeypatch):
    arguments = sotu_comparison.parse_arguments(
        [
            *"--cpu --seeds 1 --methods awd_lstm spectrum_control awd_lstm --updates 12".split(),
            *"--dim 8 --hidden 12".split(),
            "--work-dir",
            str(tmp_path / "work"),
        ]
    )
    table = sotu.compare(arguments)
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:4]] == [
        "awd_lstm",
        "spectrum_control",
    ]
    assert "12 updates each" in table and "test ppl" in table

    def refuse(*_, **__):
        raise AssertionError("trained again")

    monkeypatch.setattr(LanguageModelRun, "training", refuse)
    monkeypatch.setattr(LanguageModelRun, "evaluation", refuse)
    assert sotu.compare(arguments) == table


@pytest.mark.slow
@pytest.mark.usefixtures("small_text", "forked_commands")
def test_the_bottleneck_is_measured_once(tmp_path, monkeypatch):
    """A softmax of d dimensions cannot pass rank d + 2, and neither can a mixture of contexts."""
    work = tmp_path / "work"
    sizes = ("--dim", "4", "--hidden", "8", "--updates", "4", "--tokens", "64")
    argv = ["--cpu", "--seeds", "1", "--components", "3", *sizes, "--work-dir", str(work)]
    arguments = bottleneck.parse_arguments(argv)
    table = bottleneck.measure(arguments)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:5]]
    assert [row[0] for row in rows] == ["softmax", "moc-3", "mos-3"]
    ranks = {row[0]: int(row[4]) for row in rows}
    assert 1 <= ranks["softmax"] <= 6 and 1 <= ranks["moc-3"] <= 6
    found = json.loads((work / "bottleneck.json").read_text("utf-8"))
    assert found["mos-3/seed-1"]["outputs"]["tokens"] == 64
    assert found["mos-3/seed-1"]["expected_pairwise_kl"] > 0
    assert (work / "spectra.png").read_bytes().startswith(b"\x89PNG")

    def refuse(*_, **__):
        raise AssertionError("done again")

    for name in ("training", "predictions"):
        monkeypatch.setattr(bottleneck.LanguageModelRun, name, refuse)
    assert bottleneck.measure(arguments) == table


def test_mixtures_of_softmaxes_have_each_k_and_the_mixture_of_contexts_the_largest():
    layers = bottleneck.output_layers(bottleneck.KINDS, [15, 3, 3])
    assert list(layers) == ["softmax", "moc-15", "mos-3", "mos-15"]
    assert "--mixture-components" not in layers["softmax"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_commands")
def test_one_model_from_nothing_to_all_its_perplexities(tmp_path, monkeypatch):
    """On a corpus of the user's own, for which no trigram model is known."""
    write_text(tmp_path)
    monkeypatch.setattr(
        sotu,
        "EVALUATIONS",
        {k: v for k, v in sotu.EVALUATIONS.items() if k != "dynamic"},
    )
    arguments = sotu.parse_arguments(
        [
            *"--cpu --epochs 1 --fine-tuning-epochs 1 --dim 8 --hidden 12".split(),
            "--corpus",
            str(tmp_path),
            "--work-dir",
            str(tmp_path / "work"),
        ]
    )
    text = sotu.train_and_evaluate(arguments)
    rows = {line.split("|")[1].strip(): line.split("|")[2:4] for line in text.splitlines()[2:5]}
    assert set(rows) == {"AWD-LSTM", "fine-tuned", "fine-tuned, continuous cache"}
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
        ("bottleneck", "--components"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_before_anything_is_written(tmp_path, command, flag):
    script, action = {
        "bottleneck": (bottleneck, bottleneck.measure),
        "compare": (sotu_comparison, sotu.compare),
        "run": (sotu, sotu.train_and_evaluate),
    }[command]
    work = tmp_path / "work"
    arguments = script.parse_arguments(["--cpu", flag, "0", "--work-dir", str(work)])
    with pytest.raises(ConfigurationError, match=f"{flag} of at least 1"):
        action(arguments)
    assert not work.exists()


def test_a_search_on_other_words_is_not_taken_for_this_one(tmp_path, monkeypatch):
    def start(*more):
        sotu.train_and_evaluate(
            sotu.parse_arguments(["--cpu", "--dim", "8", "--work-dir", str(tmp_path), *more])
        )

    class Stopped(Exception):
        pass

    def stop(*_):
        raise Stopped

    monkeypatch.setattr(sotu, "PreparedText", stop)
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


def test_packages_for_translations_are_not_asked_for(tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("sentencepiece", "sacrebleu") else find_spec(name),
    )
    with pytest.raises(ConfigurationError, match="--updates"):
        sotu.compare(
            sotu_comparison.parse_arguments(["--updates", "0", "--work-dir", str(tmp_path)])
        )


@pytest.mark.parametrize(
    "damage, message",
    [(None, r"the file .*valid\.tokens"), (b"", "words in"), ("ä".encode("latin-1"), "UTF-8 in")],
)
def test_an_unusable_corpus_is_refused(damage, message, tmp_path):
    write_text(tmp_path)
    if damage is None:
        (tmp_path / "valid.tokens").unlink()
    else:
        (tmp_path / "valid.tokens").write_bytes(damage)
    work = tmp_path / "work"
    arguments = sotu.parse_arguments(["--cpu", "--corpus", str(tmp_path), "--work-dir", str(work)])
    with pytest.raises(DataError, match=message):
        sotu.train_and_evaluate(arguments)
    assert not work.exists()


def test_a_corpus_is_counted_and_another_one_is_told_apart(tmp_path):
    for split, text in {"train": "a b a\n<unk> c\n", "valid": "a\n", "test": "a d"}.items():
        (tmp_path / f"{split}.tokens").write_text(text, "utf-8")
    found = own_text.prepare(tmp_path / "text", tmp_path)
    assert found["tokens"] == {"train": 5, "valid": 1, "test": 2}
    assert found["lines"] == {"train": 2, "valid": 1, "test": 1}
    assert (found["vocabulary"], found["unknown"]["train"]) == (3, 1)
    assert (tmp_path / "text" / "test.tokens").read_text("utf-8") == "a d\n"
    sums = {own_text.checksum(tmp_path)}
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.tokens").write_text("a b a\n<unk> d\n", "utf-8")
        sums.add(own_text.checksum(tmp_path))
    assert len(sums) == 4


def test_binary_data_are_made_anew_after_an_interruption(tmp_path):
    """fairseq-preprocess, which writes dict.txt first, refuses to start where there is one."""
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.tokens").write_text("a b a c\n", "utf-8")
    work = WorkDir(tmp_path / "work")
    with work.locked():
        (work.root / "binary").mkdir()
        (work.root / "binary" / "dict.txt").write_text("a 1\n")
        PreparedText(work, None, tmp_path).prepare(Workers(work, "cpu", 1))
        assert len((work.root / "binary" / "dict.txt").read_text().splitlines()) > 2
