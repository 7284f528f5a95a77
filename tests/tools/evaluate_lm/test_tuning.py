"""The grid of ``evaluate-lm --tune`` is widened along every axis whose end is the best."""

import itertools

from spectral_fairseq.lm.tuning import GridPoint, GridSearch
from spectral_fairseq.tools.evaluate_lm.tuning import MOST_STEPS, search_widening


def search(axes):
    """The smaller theta and lambda are, the better."""
    points = [
        GridPoint({"theta": theta, "lambda": weight}, theta + weight)
        for theta, weight in itertools.product(axes["theta"], axes["lambda"])
    ]
    return GridSearch("cache", 10, points)


def test_each_axis_is_widened_by_itself():
    axes = {"theta": (0.5, 1.0), "lambda": (0.25, 0.5)}
    best = search_widening(axes, (), search).best.values
    assert best == {"theta": 0.5 / 2**MOST_STEPS, "lambda": 0.25 / 2**MOST_STEPS}
    best = search_widening(axes, ["theta"], search).best.values
    assert best == {"theta": 0.5, "lambda": 0.25 / 2**MOST_STEPS}
