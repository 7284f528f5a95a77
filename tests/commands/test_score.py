"""``spectral-fairseq score``, against figures that were computed by hand."""

import functools
import io
import math
import os
import sys

import pytest

from spectral_fairseq.commands.score import bleu_details, nbest_bleu, read_generated
from spectral_fairseq.errors import DataError
from tests.reference import evaluation as naive

pytest.importorskip("fairseq")

# Matches, whatever the case: 8 of 9 words, 6 of 7 pairs, 4 of 5 triples, 2 of 3 of four words.
TRANSLATIONS = "w1 w2 w3 w4 w6\nW1 w3 w2 w4\n"
REFERENCES = "w1 w2 w3 W4 w5\nw1 w3 w2 w4\n"
BLEU = 100 * (8 / 9 * 6 / 7 * 4 / 5 * 2 / 3) ** 0.25


@pytest.fixture
def files(tmp_path):
    (tmp_path / "sys").write_text(TRANSLATIONS, "utf-8")
    (tmp_path / "ref").write_text(REFERENCES, "utf-8")
    return ["--sys", tmp_path / "sys", "--ref", tmp_path / "ref"]


@pytest.fixture
def score(command, files):
    """What the command prints of both files."""
    return functools.partial(command, "score", *files)


def test_bleu_of_words(score):
    printed = score("--ignore-case")
    assert printed.startswith(f"BLEU4 = {BLEU:.2f}, 88.9/85.7/80.0/66.7 (BP=1.000,")
    assert score("--order", 1).startswith("BLEU1 = 66.67, 66.7 (")


def test_sacrebleu(score):
    printed = score("--ignore-case", "--sacrebleu")
    assert printed.startswith(f"BLEU = {BLEU:.2f} 88.9/85.7/80.0/66.7 (BP = 1.000")


def test_sentences(score):
    first, second = score("--ignore-case", "--sentence-bleu").splitlines()
    smoothed = 100 * math.prod([4 / 5, 4 / 5, 3 / 4, 2 / 3]) ** 0.25
    assert first.startswith(f"0 BLEU4 = {smoothed:.2f}, ")
    assert second.startswith("1 BLEU4 = 100.00, 100.0/100.0/100.0/100.0 ")


def test_standard_input_and_short_flags(files, command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(REFERENCES))
    printed = command("score", "-r", files[-1], "-o", 2)
    assert printed.startswith("BLEU2 = 100.00, 100.0/100.0 ")


@pytest.mark.parametrize("more, text, match", [
    ([], "w1\n", "1 and 2"),
    ([], "\n\n", "found none"),
    (["--sentence-bleu"], "w1 w2\n\n", "word in line 2 of both texts; found none"),
    (["--order", "5"], "w1\nw2\n", "<= 4"),
    (["--ref", "absent"], "w1\nw2\n", "no such file"),
])  # fmt: skip
def test_refusals(more, text, match, score, tmp_path):
    (tmp_path / "sys").write_text(text, "utf-8")
    assert match in score(*more, rc=2)


def test_one_kind_of_score(score, capsys):
    with pytest.raises(SystemExit):
        score("--sacrebleu", "--sentence-bleu")
    assert "not allowed with" in capsys.readouterr().err


# Precision and recall over n-best lists, against BLEU counted by hand.


CONTEXTS = [
    (
        ["the cat sat on the mat", "a cat was on the mat"],
        ["the cat sat on a mat", "the the the the", "cat"],
    ),
    (["so it is"], ["so it is", "it was so then", "nothing"]),
]


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_naive_parity(order):
    found, _ = nbest_bleu(CONTEXTS)
    expected = naive.nbest(CONTEXTS, order)
    assert found[f"bleu_{order}_precision"] == pytest.approx(expected[0], rel=1e-9)
    assert found[f"bleu_{order}_recall"] == pytest.approx(expected[1], rel=1e-9)


def test_known_answers():
    found, signature = nbest_bleu([(["a b c d"], ["a b c d", "x y z"])])
    assert found["bleu_4_precision"] == pytest.approx(0.5)
    assert found["bleu_4_recall"] == pytest.approx(1)
    assert "smooth:exp" in signature and "tok:none" in signature


def test_generated_files(tmp_path):
    file = tmp_path / "generate-test.txt"
    file.write_text(
        "INFO noise\nS-1\tquelle\nT-1\ta b c\nH-1\t-0.5\ta b c\nD-1\t-0.5\ta b c\nP-1\t0 0\n"
        "H-1\t-0.9\ta b\nT-0\tx\nH-0\t-1.0\ty\nH-0\t-1.5\t\n"
    )
    contexts = read_generated(file)
    assert contexts == [(["x"], ["y", ""]), (["a b c"], ["a b c", "a b"])]
    found, signature = nbest_bleu(contexts)
    assert 0 < found["bleu_1_precision"] < found["bleu_1_recall"] == pytest.approx(0.5)
    details = bleu_details(contexts, signature, file)
    assert details["sentences"] == 2 and details["hypotheses"] == {"least": 2, "most": 2}


def test_a_line_separator_of_unicode_does_not_cut_a_sentence(tmp_path):
    file = tmp_path / "out.txt"
    file.write_text("T-0\ta\u2028b\nH-0\t-1\ta\u0085b\n", "utf-8")
    assert read_generated(file) == [(["a\u2028b"], ["a\u0085b"])]


def test_a_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="a device or a pipe"):
        read_generated(tmp_path / "pipe")


def test_unusable_files(tmp_path):
    file = tmp_path / "out.txt"
    for content in ("", "H-0\t-1\ta\n", "T-0\ta\nT-1\tb\nH-0\t-1\ta\n"):
        file.write_text(content)
        with pytest.raises(DataError, match="T-<n> and H-<n>"):
            read_generated(file)
    with pytest.raises(DataError, match="fairseq-generate"):
        read_generated(tmp_path / "absent")
    with pytest.raises(DataError):
        nbest_bleu([(["a"], [])])
