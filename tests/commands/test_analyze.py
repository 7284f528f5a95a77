"""``spectral-fairseq analyze`` as users type it: outputs, and clear errors that leave nothing."""

import functools
import io
import json
import os
import shutil
import sys

import numpy as np
import pytest
import torch

from spectral_fairseq.commands.main import main
from tests.checkpoints.made import cone, entries, save, save_dictionary, with_padding


@pytest.fixture
def checkpoint(tmp_path):
    save_dictionary(tmp_path / "dict.txt", 57)
    return save(tmp_path / "checkpoint_best.pt", entries(with_padding(cone())))


@pytest.fixture
def analyze(command):
    return functools.partial(command, "analyze")


@pytest.mark.slow
def test_text_and_json(checkpoint, tmp_path, analyze):
    shared = (checkpoint, "--dict", tmp_path, "--words", "w3", "--isotropy-words", 30)
    short, text = analyze(*shared), analyze(*shared, "--all")
    assert len(short.splitlines()) <= 25 and "Neighbours of w3" in short and "--all" in short
    assert short.index("The word vectors") < short.index("mean cosine  ")
    assert len(analyze(checkpoint, "--dict", tmp_path).splitlines()) <= 25
    assert "I1, centred" in text and "Neighbours of w3" in text and "isotropy:30x10" in text
    found = json.loads(analyze(*shared, "--format", "json"))
    assert found["command"] == "analyze"
    assert found["checkpoints"][0]["label"] == checkpoint.stem
    assert f"{found['checkpoints'][0]['measures']['i1']:.4g}" in text


@pytest.mark.slow
def test_report_folder(checkpoint, tmp_path, analyze):
    pytest.importorskip("matplotlib")
    out = tmp_path / "report"
    analyze(checkpoint, "--out", out)
    written = {path.name for path in out.iterdir()}
    assert {"report.html", "analysis.json", "singular_values.png", "projection.svg"} <= written
    assert json.loads((out / "analysis.json").read_text("utf-8"))["command"] == "analyze"
    assert "--overwrite" in analyze(checkpoint, "--out", out, rc=2)
    analyze(checkpoint, "--out", out, "--overwrite")


@pytest.mark.slow
def test_a_folder_that_would_clear_the_terminal(checkpoint, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["analyze", str(checkpoint), "--out", str(tmp_path / "a\x1b[2J")]) == 0
    said = capsys.readouterr().err
    assert "\x1b" not in said and "a\\x1b[2J" in said


@pytest.mark.slow
def test_a_file_whose_name_is_no_text(checkpoint, tmp_path, analyze):
    pytest.importorskip("matplotlib")
    named = checkpoint.rename(tmp_path / os.fsdecode(b"caf\xe9.pt"))
    analyze(named, "--out", tmp_path / "report")
    found = json.loads((tmp_path / "report" / "analysis.json").read_text("utf-8"))
    assert found["checkpoints"][0]["path"] == str(named)
    assert "caf\\xe9" in (tmp_path / "report" / "report.html").read_text("utf-8")


def test_the_report_replaces_none_of_its_inputs(checkpoint, tmp_path, monkeypatch, analyze):
    pytest.importorskip("matplotlib")
    counts = tmp_path / "measures.txt"
    counts.write_text("w0 5\n")
    monkeypatch.chdir(tmp_path)
    for out in (".", str(tmp_path)):
        flags = ("--counts", "measures.txt", "--out", out, "--overwrite")
        assert "does not replace; found measures.txt" in analyze(checkpoint, *flags, rc=2)
    assert counts.read_text() == "w0 5\n"


def test_a_terminal_without_such_characters(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "dict.txt").write_text("".join(f"\u00e9\u65e5{n} 2\n" for n in range(57)), "utf-8")
    argv = ["analyze", str(checkpoint), "--dict", str(tmp_path), "--words", "\u00e9\u65e53"]
    for form in ("text", "json"):
        printed = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
        assert main([*argv, "--format", form]) == 0
    (one,) = json.loads(printed.getvalue())["checkpoints"]
    assert list(one["neighbours"]) == ["\u00e9\u65e53"]


def test_what_was_measured_is_said_first(checkpoint, tmp_path, analyze):
    other = save(
        tmp_path / "separate.pt",
        {
            **entries(cone(seed=1), name="encoder.embed_tokens"),
            **entries(with_padding(cone())),
            "decoder.output_projection.weight": with_padding(cone(seed=3)),
        },
        updates=31_200,
        model={"_name": "transformer"},
    )
    text = " ".join(analyze(checkpoint, other).split())
    warning, rest = text.split("checkpoint_best: a model of unknown architecture")
    assert warning.startswith("Warning: No dictionary was used for checkpoint_best, separate:")
    assert "separate: transformer, 31,200 updates Measured: decoder.output_projection" in rest
    assert "Not measured: encoder.embed_tokens, decoder.embed_tokens" in rest
    assert rest.index("The word vectors") < rest.index("mean cosine 0.")
    with_words = analyze(checkpoint, "--dict", tmp_path)
    assert "Warning" not in with_words and with_words.startswith("checkpoint_best")


def test_a_table_of_another_framework(tmp_path, analyze):
    np.savez(tmp_path / "model.npz", Wemb=cone(60, 6).numpy(), W=cone(50, 5).numpy())
    (tmp_path / "counts.txt").write_text("".join(f"{1000 // (n + 1)}\n" for n in range(60)))
    (tmp_path / "vocab.txt").write_text("".join(f"w{n}\n" for n in range(60)))
    flags = ("--counts", tmp_path / "counts.txt", "--dict", tmp_path / "vocab.txt", "--words", "w3")
    text = analyze(tmp_path / "model.npz", *flags, "--all")
    assert "Warning" not in text and "Measured: Wemb, the table of the input" in text
    assert "norm and log count" in text and "Neighbours of w3 in model: w" in text
    chosen = analyze(tmp_path / "model.npz", "--tensor", "W", "--format", "json")
    (one,) = json.loads(chosen)["checkpoints"]
    assert (one["table"]["name"], one["table"]["rows"]) == ("W", 50)
    error = analyze(tmp_path / "model.npz", "--tensor", "V", rc=2)
    assert "Wemb, plain, 60 x 6" in error and "W (50 x 5)" in error
    (tmp_path / "page").write_text("<html>404</html>")
    error = analyze(tmp_path / "page", rc=2)
    assert "starts with b'<html>404" in error and "weights_only" not in error


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


def truncated(path):
    save(path, entries(with_padding(cone())))
    path.write_bytes(path.read_bytes()[:900])


BROKEN = {
    "truncated": (truncated, "cannot be read"),
    "code": (lambda path: torch.save({"model": {"x": Evil()}}, path), "could run code"),
    "no table": (lambda path: save(path, {"fc1.weight": torch.ones(3, 3)}), "--table NAME"),
    "zeros": (lambda path: save(path, entries(torch.zeros(9, 3))), "zeros only"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_bad_checkpoints(what, tmp_path, analyze, monkeypatch):
    """One error for a file that cannot be read, opened, or measured; it leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    make, message = BROKEN[what]
    make(tmp_path / "checkpoint.pt")
    before = sorted(tmp_path.iterdir())
    error = analyze(tmp_path / "checkpoint.pt", "--out", tmp_path / "report", rc=2)
    assert message in error and "expected" in error
    assert sorted(tmp_path.iterdir()) == before  # no report, and nothing was executed


def test_predictions_of_an_array_are_refused_before_it_is_measured(tmp_path, analyze):
    np.save(tmp_path / "t.npy", np.random.default_rng(0).normal(size=(50, 4)).astype("float32"))
    error = analyze(tmp_path / "t.npy", "--data", tmp_path, rc=2)
    assert "a checkpoint of fairseq for --data" in error and "Leave out --data" in error
    assert "a table 'nope'" in analyze(tmp_path / "t.npy", "--table", "nope", rc=2)


@pytest.mark.parametrize("folder", [".", ""])
def test_the_working_folder_is_no_checkpoint(folder, analyze):
    assert "found a folder" in analyze(folder, rc=2)


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--dict", "empty"), "at least one word in the dictionary"),
        (("--dict", "absent"), "no such file"),
        (("--dict", "short"), "61 rows"),
        (("--words", "w3"), "--dict"),
        (("--nbest", "a", "b"), "1 files of --nbest, one for each checkpoint"),
        (("--nbest", "absent"), "fairseq-generate"),
        (("--cosine-words", "1"), "--cosine-words"),
        (("--seed", "-1"), "--seed"),
        (("--out", "no/such"), "no such folder"),
        (("--out", "empty/report"), "found a file"),
        (("--table", "x.y"), "a table 'x.y'"),
        (("--data", "absent"), "binarised data"),
        (("--data", ".", "--tokens", "0"), "--tokens to be a whole number >= 1; found 0"),
        (("--tokens", "5"), "--data together with --tokens"),
        (("--gen-subset", "test"), "--data together with --gen-subset"),
        (("--nbest-tokenize", "13a"), "--nbest together with --nbest-tokenize"),
        (("--overwrite",), "--out together with --overwrite"),
        (("--neighbours", "5"), "--words together with --neighbours"),
        (("--isotropy-runs", "5"), "--isotropy-words together with --isotropy-runs"),
        (("--projection", "pca"), "--out together with --projection"),
        (("--projection-words", "5"), "--out together with --projection-words"),
    ],
)
def test_bad_options(flags, message, checkpoint, tmp_path, analyze, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    save_dictionary(tmp_path / "short", 5)
    assert message in analyze(checkpoint, *flags, rc=2)


@pytest.mark.parametrize(
    "arch, criterion, flags, kind",
    [
        ("transformer", "cross_entropy", ("--share-all-embeddings",), "plain"),
        ("transformer_sc", "spectrum_control", ("--share-all-embeddings",), "svd"),
        ("transformer_lm", "cross_entropy", ("--share-decoder-input-output-embed",), "plain"),
        (
            "transformer_lm_sc",
            "weight_norm",
            ("--share-decoder-input-output-embed", "--embedding-type", "weight-norm"),
            "weight-norm",
        ),
    ],
)
def test_trained_checkpoints(arch, criterion, flags, kind, train, request, tmp_path, analyze):
    path = train(arch, criterion, *flags) / "checkpoint_last.pt"
    is_lm = "_lm" in arch
    data = request.getfixturevalue("tiny_lm_data" if is_lm else "tiny_translation_data")
    printed = analyze(path, "--data", data, "--tokens", 70, "--format", "json")
    found = json.loads(printed.splitlines()[-1])
    (one,) = found["checkpoints"]
    assert one["table"]["kind"] == kind and one["table"]["dimensions"] == 16
    assert len(one["table"]["names"]) == 3 - is_lm and one["arch"] == arch
    assert one["dictionary"]["path"].startswith(str(data)) and one["progress"]["updates"] == 4
    assert one["measures"]["norm_count_pearson"] is not None
    assert one["outputs"]["tokens"] == 70
    # LayerNorm leaves d - 1 dimensions, and the log-normaliser adds one or two.
    assert 10 < one["measures"]["log_probability_rank"] <= 17
    assert (one["prior"] is not None) is (kind == "svd")


def test_a_checkpoint_that_is_replaced_before_it_is_run(checkpoint, tmp_path, analyze, monkeypatch):
    """One report had the table of a checkpoint and the predictions of the next."""
    from spectral_fairseq.commands import predictions

    def replace_and_measure(path, *_):
        os.replace(shutil.copy(path, tmp_path / "new"), path)
        return {}, None

    monkeypatch.setattr(predictions, "measure_outputs", replace_and_measure)
    error = analyze(checkpoint, "--data", tmp_path, rc=2)
    assert "replaced" in error and "numbered checkpoint" in error


def test_nbest_lists(checkpoint, tmp_path, analyze):
    file = tmp_path / "gen.txt"
    file.write_text("T-0\ta b c d\nH-0\t-1\ta b c d\nH-0\t-2\tx y\n")
    printed = analyze(checkpoint, "--nbest", file, "--format", "json")
    (one,) = json.loads(printed)["checkpoints"]
    assert one["measures"]["bleu_4_precision"] == pytest.approx(0.5)
    assert one["nbest"]["sentences"] == 1
