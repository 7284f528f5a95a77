"""Options declared once: flags and ranges follow from a dataclass."""

import argparse
from dataclasses import dataclass
from typing import Optional, Tuple

import pytest

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.options import add_flags, check_ranges, from_arguments, option


@dataclass
class Cache:
    window: int = option(9, "words", metavar="W", at_least=1)
    weight: float = option(0.5, "share of 50 %", flag_name="lambda")


@dataclass
class Search:
    values: Optional[Tuple[float, ...]] = option(None, "grid")


@dataclass
class Options:
    seed: int = option(1, "seed", at_least=0, below=100)
    kind: str = option("a", "kind", choices=("a", "b"))
    words: Tuple[str, ...] = option((), "words")
    cpu: bool = option(False, "no GPU")
    cache: Optional[Cache] = option(None, "use a cache", title="cache")
    search: Optional[Search] = option(None, "search", title="grid search", switches_group_on=False)


def parsed(*argv):
    parser = argparse.ArgumentParser()
    add_flags(parser, Options)
    return from_arguments(Options, parser.parse_args(argv))


def test_what_is_not_given_has_its_default():
    assert parsed() == Options()


def test_every_kind_of_flag():
    found = parsed("--seed", "3", "--kind", "b", "--words", "x,y", "z", "--cpu")
    assert found == Options(3, "b", ("x,y", "z"), True)


def test_a_flag_of_a_group_switches_it_on():
    assert parsed("--cache").cache == Cache()
    assert parsed("--cache-lambda", "0.1").cache == Cache(weight=0.1)


def test_some_groups_have_to_be_switched_on():
    assert parsed("--search", "--search-values", "0.1,2").search == Search((0.1, 2.0))
    with pytest.raises(ConfigurationError, match="Add --search"):
        parsed("--search-values", "0.1")


@pytest.mark.parametrize("argv", [("--seed", "x"), ("--kind", "c"), ("--search-values", "1,x")])
def test_values_of_another_type(argv, capsys):
    with pytest.raises(SystemExit):
        parsed(*argv)
    assert argv[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, message",
    [
        (("--seed", "-1"), "--seed to be a whole number >= 0 and < 100; found -1"),
        (("--seed", "100"), "< 100; found 100"),
        (("--cache-window", "0"), "--cache-window to be a whole number >= 1"),
    ],
)
def test_ranges(argv, message):
    with pytest.raises(ConfigurationError, match=message):
        check_ranges(parsed(*argv))
    check_ranges(Options())


def test_help_shows_defaults_and_percent_signs():
    parser = argparse.ArgumentParser()
    add_flags(parser, Options)
    text = " ".join(parser.format_help().split())
    assert "--cache-window W words (default: 9)" in text
    assert "share of 50 % (default: 0.5)" in text
    assert "--cpu no GPU" in text
