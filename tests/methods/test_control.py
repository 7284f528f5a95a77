"""The rule of the control: its defaults, its ranges, and when a table is changed."""

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.table_control import plan_change
from spectral_fairseq.methods.control import OPTIONS, ControlRule

OUTSIDE = {
    "decay": (-0.1, "`decay` to be a finite number >= 0 and <= 1"),
    "centering": (3.0, "`centering` to be a finite number >= 0 and <= 1"),
    "slack": (0.1, "`slack` to be a finite number >= 1"),
    "every": (0, "`every` to be a whole number >= 1"),
    "start": (-1, "`start` to be a whole number >= 0"),
    "side": ("abvoe", "`side` to be one of both, above"),
    "scale": ("fre", "`scale` to be one of fixed, free"),
}


def test_every_option_has_a_range():
    assert set(OUTSIDE) == {entry.argument for entry in OPTIONS}


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_option_outside_its_range_is_refused(name):
    value, message = OUTSIDE[name]
    with pytest.raises(ConfigurationError, match=message):
        ControlRule(**{name: value})


def test_defaults_are_those_of_the_flags_but_for_the_two_that_switch_it_on():
    for entry in OPTIONS:
        if entry.argument not in ("decay", "centering"):
            assert getattr(ControlRule(), entry.argument) == entry.default
        else:
            assert entry.default == 0.0 and getattr(ControlRule(), entry.argument) == 0.01


def test_the_change_of_k_updates_is_made_at_once():
    rule = ControlRule(decay=0.02, centering=0.03, every=4, start=4, slack=1.1)
    assert [n for n in range(1, 13) if rule.is_due(n)] == [8, 12]
    assert not ControlRule(decay=0.0, centering=0.0).active
    weight = torch.randn(20, 5, generator=torch.Generator().manual_seed(0)) + 0.3
    excluded, prior = torch.tensor([3]), torch.ones(5)
    found = rule.plan(weight, 0.5, prior=prior, excluded=excluded)
    expected = plan_change(weight, prior, 0.04, slack=1.1, centering=0.06, excluded=excluded)
    assert torch.equal(found.packed(), expected.packed())
