"""Options of fairseq's commands declared once: flags and ranges follow."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Optional

import pytest

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.options import Option, check_ranges, option


@dataclass
class Config:
    of_fairseq: int = field(default=-1, metadata={"help": "not checked"})
    batch_size: int = option(1, "sentences", at_least=1, below=100)
    window: Optional[int] = option(None, "words", at_least=1)
    share: float = option(0.5, "a share", at_least=0, at_most=1)
    kind: str = option("a", "kind", choices=("a", "b"))


@pytest.mark.parametrize(
    "given, message",
    [
        ({"batch_size": 0}, "--batch-size to be a whole number >= 1 and < 100; found 0"),
        ({"batch_size": 100}, "< 100; found 100"),
        ({"batch_size": 1.5}, "a whole number"),
        ({"window": 0}, "--window to be a whole number >= 1"),
        ({"share": float("nan")}, "--share to be a finite number >= 0 and <= 1"),
    ],
)
def test_ranges(given, message):
    with pytest.raises(ConfigurationError, match=message):
        check_ranges(SimpleNamespace(**{**vars(Config()), **given}), Config)
    check_ranges(Config(), Config)


def test_an_option_of_a_tuple_is_a_field_too():
    declared = Option("spectrum_c2", 0.5, "c2", above=0, alias="--c2", parse=lambda c: 2 * c)
    assert declared.flag == "--spectrum-c2" and declared.read(SimpleNamespace(spectrum_c2=1)) == 2
    assert declared.field.default == 0.5
    assert declared.field.metadata["argparse_alias"] == "--c2"
    with pytest.raises(ConfigurationError, match="--spectrum-c2 to be a finite number > 0"):
        declared.read(SimpleNamespace(spectrum_c2=0))
