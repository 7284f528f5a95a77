"""``spectral-fairseq score``, against figures that were computed by hand."""

import io
import math
import sys

import pytest

from spectral_fairseq.commands.main import main

pytest.importorskip("fairseq")

# Matches, whatever the case: 8 of 9 words, 6 of 7 pairs, 4 of 5 triples, 2 of 3 of four words.
TRANSLATIONS = "w1 w2 w3 w4 w6\nW1 w3 w2 w4\n"
REFERENCES = "w1 w2 w3 W4 w5\nw1 w3 w2 w4\n"
BLEU = 100 * (8 / 9 * 6 / 7 * 4 / 5 * 2 / 3) ** 0.25


@pytest.fixture
def files(tmp_path):
    (tmp_path / "sys").write_text(TRANSLATIONS, "utf-8")
    (tmp_path / "ref").write_text(REFERENCES, "utf-8")
    return ["score", "--sys", str(tmp_path / "sys"), "--ref", str(tmp_path / "ref")]


def test_bleu_of_words(files, capsys):
    assert main([*files, "--ignore-case"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"BLEU4 = {BLEU:.2f}, 88.9/85.7/80.0/66.7 (BP=1.000,")
    assert main([*files, "--order", "1"]) == 0
    assert capsys.readouterr().out.startswith("BLEU1 = 66.67, 66.7 (")


def test_sacrebleu(files, capsys):
    assert main([*files, "--ignore-case", "--sacrebleu"]) == 0
    assert capsys.readouterr().out.startswith(f"BLEU = {BLEU:.2f} 88.9/85.7/80.0/66.7 (BP = 1.000")


def test_sentences(files, capsys):
    assert main([*files, "--ignore-case", "--sentence-bleu"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    smoothed = 100 * math.prod([4 / 5, 4 / 5, 3 / 4, 2 / 3]) ** 0.25
    assert first.startswith(f"0 BLEU4 = {smoothed:.2f}, ")
    assert second.startswith("1 BLEU4 = 100.00, 100.0/100.0/100.0/100.0 ")


def test_standard_input_and_short_flags(files, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(REFERENCES))
    assert main(["score", "-r", files[-1], "-o", "2"]) == 0
    assert capsys.readouterr().out.startswith("BLEU2 = 100.00, 100.0/100.0 ")


@pytest.mark.parametrize("more, text, match", [
    ([], "w1\n", "1 and 2"),
    ([], "\n\n", "found none"),
    (["--sentence-bleu"], "w1 w2\n\n", "word in line 2 of both texts; found none"),
    (["--order", "5"], "w1\nw2\n", "<= 4"),
    (["--ref", "absent"], "w1\nw2\n", "no such file"),
])  # fmt: skip
def test_refusals(more, text, match, files, tmp_path, capsys):
    (tmp_path / "sys").write_text(text, "utf-8")
    assert main([*files, *more]) == 2
    assert match in capsys.readouterr().err


def test_one_kind_of_score(files, capsys):
    with pytest.raises(SystemExit):
        main([*files, "--sacrebleu", "--sentence-bleu"])
    assert "not allowed with" in capsys.readouterr().err
