"""Which words of two checkpoints are compared, how far apart they are; seeds of a method."""

import pytest
import torch

from spectral_fairseq.analysis.results import Drift, Reference, by_method, common_rows, drift
from spectral_fairseq.checkpoints.dictionary import WordList
from spectral_fairseq.checkpoints.tables import StoredTable
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.ranks import random_cka
from tests.checkpoints.made import cone
from tests.reference import measures as naive


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
    nothing = {"drift_cka": None, "drift_procrustes": None}
    assert drift(one, longer) == Drift(nothing, random={}, words=0)


def test_the_measures_are_those_of_the_common_words():
    weight = cone(40, 5)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    symbols = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"
    moved = weight + 0.1 * cone(40, 5, seed=1)
    one = reference(weight, range(40), 40, symbols)
    other = reference(moved[order], range(40), 40, [symbols[at] for at in order])
    found, _, count = drift(one, other)
    assert count == 40
    assert found["drift_cka"] == pytest.approx(naive.linear_cka(weight, moved))
    expected = naive.procrustes_residual(weight, moved)
    assert found["drift_procrustes"] == pytest.approx(expected)
    same = reference(torch.ones(40, 5), range(40), 40, symbols)
    assert drift(same, other)[0] == {"drift_cka": None, "drift_procrustes": None}


def test_random_values_are_those_of_the_words_in_common():
    """Two random tables of 4,000 words and other widths, which share 400 words."""
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randn(4000, width, generator=generator) for width in (60, 30)]
    symbols = [[f"w{word}" for word in range(start, start + 4000)] for start in (0, 3600)]
    one, other = (
        reference(table, range(4000), 4000, words) for table, words in zip(tables, symbols)
    )
    measures, random, words = drift(one, other)
    assert words == 400
    assert measures["drift_cka"] == pytest.approx(random["drift_cka"], rel=0.1)
    assert measures["drift_cka"] > 5 * random_cka(4000, 60)
    same_width = reference(
        torch.randn(4000, 60, generator=generator), range(4000), 4000, symbols[1]
    )
    measures, random, _ = drift(one, same_width)
    assert measures["drift_procrustes"] == pytest.approx(random["drift_procrustes"], rel=0.02)
    few = reference(tables[0], range(4000), 4000, [f"w{word}" for word in range(3800, 7800)])
    assert "drift_procrustes" not in drift(one, few).random  # 200 words of 60 dimensions


def checkpoint(label, **measures):
    return {"label": label, "measures": measures}


def test_seeds_of_a_method():
    checkpoints = [
        checkpoint("p1", i1=0.5, rank=3.0),
        checkpoint("sc", i1=0.9, rank=7.0),
        checkpoint("p2", i1=0.7, rank=None),
    ]
    plain, controlled = by_method(checkpoints, ["plain", "controlled", "plain"])
    assert plain["name"] == "plain" and plain["labels"] == ["p1", "p2"]
    assert plain["measures"] == {
        "i1": {"mean": pytest.approx(0.6), "std": pytest.approx(0.02**0.5)}
    }
    assert controlled["measures"]["rank"] == {"mean": 7.0, "std": None}
    with pytest.raises(ConfigurationError, match="3 names in --methods"):
        by_method(checkpoints, ["plain", "controlled"])
