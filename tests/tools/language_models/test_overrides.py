"""``--model-overrides``: what it may be."""

import pytest

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.tools.language_models.overrides import parse_overrides


@pytest.mark.parametrize("text", ["mem_len=3", "[1]", "{1: 2}", "{'a': print()}", "{"])
def test_overrides_are_a_dictionary_of_literals(text):
    with pytest.raises(ConfigurationError, match="model-overrides"):
        parse_overrides(text)
    assert parse_overrides("{'mem_len': 640, 'same_length': True}") == {
        "mem_len": 640,
        "same_length": True,
    }
