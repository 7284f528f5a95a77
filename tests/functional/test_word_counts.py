import math

import pytest

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.word_counts import smoothed_log_counts, were_counted


def test_log_counts_are_positive_and_follow_the_counts():
    logs = smoothed_log_counts([0, 1, 2, 100, 10**9])
    assert float(logs[0]) == float(logs[1]) == pytest.approx(math.log(2))
    assert (logs[1:].diff() > 0).all()
    assert float(logs[3]) == pytest.approx(math.log(100), rel=3e-3)


@pytest.mark.parametrize(
    "counts, message",
    [
        ([], "0 words"),
        ([0, 1, 1], "fairseq-preprocess"),
        ([3, -1], "-1"),
        ([3, float("nan")], "nan"),
    ],
)
def test_counts_that_say_nothing_are_refused(counts, message):
    with pytest.raises(DataError, match=message):
        smoothed_log_counts(counts)


@pytest.mark.parametrize(
    "counts, expected",
    [
        ([0, 0, 7, 5, 3, 1, 1], True),
        ([2, 1], True),
        ([100] * 9, False),
        ([1] * 9, False),
        ([0, 0, *[100] * 9, 0, 0, 0], False),  # fillers
        ([0, 0, *[100] * 9, 1, 1], False),  # symbols of languages
        ([1, *[100] * 9], True),
        ([], False),
        ([0], False),
    ],
)
def test_counts_that_only_fill_a_dictionary(counts, expected):
    assert were_counted(counts) is expected
