"""Precision and recall over n-best lists, against BLEU counted by hand."""

import os

import pytest

from spectral_fairseq.commands.nbest import bleu_details, nbest_bleu, read_generated
from spectral_fairseq.errors import DataError
from tests.reference import evaluation as naive

pytest.importorskip("sacrebleu")

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
