"""Which words of two checkpoints are compared, and how far their tables are apart."""

import pytest
import torch

from spectral_fairseq.analysis.drift import Reference, common_rows, drift
from spectral_fairseq.checkpoints.dictionary import WordList
from spectral_fairseq.checkpoints.tables import StoredTable
from tests.checkpoints.made import cone
from tests.reference import table_comparison as naive


def reference(weight, rows, stored, symbols=None):
    rows = torch.tensor(rows)
    table = StoredTable("t", ["t"], "plain", weight, rows, stored, "float32")
    words = None if symbols is None else WordList("dict.txt", list(symbols), [1] * len(symbols))
    return Reference("first", table, words)


def test_words_are_matched_by_their_spelling():
    one = reference(cone(4, 2), [0, 2, 3, 4], 5, "a?bcd")
    other = reference(cone(3, 2, seed=1), [0, 1, 3], 4, "dx?b")
    left, right = common_rows(one, other)
    assert (left.tolist(), right.tolist()) == ([3, 1], [0, 2])


def test_without_dictionaries_by_their_row():
    one, other = reference(cone(3, 2), [0, 2, 3], 4), reference(cone(3, 2), [2, 3, 1], 4, "abcd")
    left, right = common_rows(one, other)
    assert (left.tolist(), right.tolist()) == ([1, 2], [0, 1])
    longer = reference(cone(3, 2), [2, 3, 1], 5)
    assert common_rows(one, longer) is None
    assert drift(one, longer) == ({"drift_cka": None, "drift_procrustes": None}, 0)


def test_the_measures_are_those_of_the_common_words():
    weight = cone(40, 5)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    symbols = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"
    moved = weight + 0.1 * cone(40, 5, seed=1)
    one = reference(weight, range(40), 40, symbols)
    other = reference(moved[order], range(40), 40, [symbols[at] for at in order])
    found, count = drift(one, other)
    assert count == 40
    assert found["drift_cka"] == pytest.approx(naive.linear_cka(weight, moved))
    expected = naive.procrustes_residual(weight, moved)
    assert found["drift_procrustes"] == pytest.approx(expected)
    same = reference(torch.ones(40, 5), range(40), 40, symbols)
    assert drift(same, other)[0] == {"drift_cka": None, "drift_procrustes": None}
