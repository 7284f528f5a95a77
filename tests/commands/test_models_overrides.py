"""``--model-overrides``: what it may be."""

import pytest

from spectral_fairseq.commands.models import check_overrides, parse_overrides
from spectral_fairseq.errors import ConfigurationError


@pytest.mark.parametrize("text", ["mem_len=3", "[1]", "{1: 2}", "{'a': print()}", "{"])
def test_overrides_are_a_dictionary_of_literals(text):
    with pytest.raises(ConfigurationError, match="model-overrides"):
        parse_overrides(text)
    assert parse_overrides("{'mem_len': 640, 'same_length': True}") == {
        "mem_len": 640,
        "same_length": True,
    }


def test_settings_that_hold_one_another_are_read_once():
    node = {"leaf": 1}
    for _ in range(60):
        node = {"a": node, "b": node}
    node["again"] = node
    check_overrides({"cfg": node}, {"leaf": 2})
    with pytest.raises(ConfigurationError, match="'other'"):
        check_overrides({"cfg": node}, {"other": 2})
