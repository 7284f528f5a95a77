"""Combinations of parameters, of which the fast tests take a part that has every value."""

import itertools

import pytest


def covering(*axes):
    """Every combination of a value of each axis, as parameters; those beyond the cover are slow.

    The cover goes through all axes at once, and has as many combinations as the longest has values.
    """
    axes = [list(axis) for axis in axes]
    cover = {
        tuple(place % len(axis) for axis in axes)
        for place in range(max(len(axis) for axis in axes))
    }
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(axes, places)),
            marks=() if places in cover else pytest.mark.slow,
        )
        for places in itertools.product(*(range(len(axis)) for axis in axes))
    ]
