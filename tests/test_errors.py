import pickle

import numpy as np
import pytest
import torch

from spectral_fairseq.embeddings import PlainEmbedding
from spectral_fairseq.errors import (
    ConfigurationError,
    DamagedError,
    DataError,
    SpectralFairseqError,
    arguments_as_flags,
    check_alike,
    check_choice,
    check_count,
    check_enough,
    check_range,
    check_shape,
    check_type,
    listed,
    plainly,
    printable,
    wrapped,
)
from spectral_fairseq.formats.counts import with_counts


def test_arguments_are_renamed_in_every_part_and_the_class_is_kept():
    with pytest.raises(DataError) as caught, arguments_as_flags(dim="--embed-dim"):
        raise DataError("`dim` above `rows`", "`dim` 3", "Lower `dim`; see `dim --help`.")
    assert str(caught.value) == (
        "expected --embed-dim above `rows`; found --embed-dim 3. Lower --embed-dim; "
        "see `dim --help`."
    )
    assert caught.value.found == "--embed-dim 3"


def test_blocks_nest_and_decorate():
    @arguments_as_flags(rate="--lr")
    def check():
        raise ConfigurationError("`rate` above `decay`", "0", "Raise `rate`.")

    for _ in range(2):
        with pytest.raises(ConfigurationError, match="--lr above --weight-decay"):
            with arguments_as_flags(decay="--weight-decay", rate="--unused"):
                check()


def test_the_cause_and_the_place_of_the_error_are_kept():
    def check():
        try:
            int("x")
        except ValueError as error:
            raise ConfigurationError("`a` whole", "x", "Correct it.") from error

    with pytest.raises(ConfigurationError) as caught, arguments_as_flags(a="--a"):
        check()
    assert isinstance(caught.value.__cause__, ValueError)
    assert [entry.name for entry in caught.traceback][-1] == "check"


def test_a_paragraph_fits_a_terminal_and_no_flag_is_broken():
    lines = wrapped("--no-cache a " * 30, "  ").split("\n")
    assert all(line.startswith(("  --no-cache", "  a")) for line in lines)
    assert 76 < max(map(len, lines)) <= 79 and wrapped("x" * 99) == "x" * 99


def test_other_errors_pass_unchanged():
    error = ValueError("`a`")
    with pytest.raises(ValueError) as caught, arguments_as_flags(a="--a"):
        raise error
    assert caught.value is error


def test_no_escape_sequence_reaches_a_terminal():
    error = DataError("a", "\x1b[2J\r\u009b1mred\tend", "Correct\nit.")
    assert str(error) == "expected a; found \\x1b[2J\\r\\x9b1mred\\tend. Correct\\nit."
    assert error.found.startswith("\x1b")  # as given, for code that asks
    assert printable("▁the – σ", keep="") == "▁the – σ" and printable("a\nb", keep="") == "a\\nb"


def test_an_error_that_brings_its_remedy_keeps_it():
    with pytest.raises(DamagedError) as caught, arguments_as_flags(path="--path"):
        raise DamagedError("words in `path`", "none")
    assert (caught.value.expected, caught.value.found) == ("words in --path", "none")
    assert "copy it again" in str(pickle.loads(pickle.dumps(caught.value)))


@pytest.mark.parametrize(
    "value, bounds, wanted",
    [
        (-0.5, {"at_least": 0, "below": 1}, "finite number >= 0 and < 1"),
        (1.0, {"at_least": 0, "below": 1}, "finite number >= 0 and < 1"),
        (0, {"above": 0}, "finite number > 0"),
        (float("inf"), {"at_least": 0}, "finite number >= 0"),
        (float("nan"), {"at_most": 5}, "finite number <= 5"),
        (2.5, {"at_least": 1, "whole": True}, "whole number >= 1"),
        (None, {"at_least": 0}, "finite number >= 0"),
    ],
)
def test_numbers_outside_a_range(value, bounds, wanted):
    with pytest.raises(ConfigurationError, match=f"`p` to be a {wanted}; found {value}"):
        check_range("`p`", value, **bounds)


def test_what_the_common_checks_let_pass():
    check_range("`p`", None, at_least=0, optional=True)
    check_range("`p`", 2.0, at_least=2, at_most=2, whole=True)
    check_range("`p`", float("nan"))
    check_choice("`kind`", "mos", ("mos", "moc"))
    check_shape("`bias`", torch.zeros(3), (3,), "Give one value for each word.")
    check_enough(2, 2, "rows", "Give more.")
    check_count(2, 2, "rows", "Give two.")
    check_type(True, (int, str), "a number", "Give one.")
    check_alike("one width", {"--a": 2, "--b": 2}, "Make them equal.")


@pytest.mark.parametrize(
    "check, given, message",
    [
        (check_choice, ("`kind`", "max", ("mos", "moc")), "one of mos, moc; found 'max'"),
        (check_shape, ("`b`", torch.zeros(3), (1, 3), "-"), r"of shape \(1, 3\); found shape \(3,"),
        (check_enough, (0, 1, "row", "Give one."), "at least one row; found none. Give one."),
        (check_enough, (9, 1000, "rows", "-"), "at least 1,000 rows; found 9"),
        (check_count, (3, 2, "rows", "-"), "2 rows; found 3"),
        (check_type, (1, str, "a text", "-"), "a text; found an object of type int"),
        (check_alike, ("one width", {"--a": 1, "--b": 2}, "-"), "found --a 1 and --b 2"),
    ],
)
def test_what_the_common_checks_refuse(check, given, message):
    error = DataError if check is check_enough else ConfigurationError
    with pytest.raises(error, match=message):
        check(*given)


def test_some_of_many():
    assert listed([]) == "none" and listed(["a", 2]) == "a, 2"
    assert listed([(np.int64(3), 2)]) == "(3, 2)"
    assert listed("abcd", 3, "; ") == "a; b; c; ..."


@pytest.mark.parametrize(
    "value, spelled",
    [
        (np.int64(3), "3"),
        (np.float32(0.5), "0.5"),
        (np.str_("a"), "'a'"),
        (torch.tensor(2), "2"),
        ((np.int32(4), (np.int32(5),)), "(4, (5,))"),
        ((), "()"),
        ("np.int64(3)", "'np.int64(3)'"),
        (None, "None"),
    ],
)
def test_numbers_of_other_packages_are_spelled_as_pythons(value, spelled):
    assert plainly(value) == spelled


def test_refused_numbers_of_numpy_are_plain():
    for refuse in (
        lambda: check_range("`a`", np.int64(-1), at_least=0),
        lambda: check_choice("`a`", np.int64(3), ["x"]),
        lambda: check_shape("a", torch.ones(2), (np.int64(3),), "-"),
        lambda: with_counts(None, np.array([0.5]), 1),
        lambda: PlainEmbedding(4, 3, padding_idx=np.int64(9)),
    ):
        with pytest.raises(SpectralFairseqError) as caught:
            refuse()
        assert "np." not in str(caught.value) and "numpy" not in str(caught.value)


@pytest.mark.parametrize("value", ["0.1", None, (1,), 10**400, float("nan")])
def test_what_is_no_number_is_outside_every_range(value):
    with pytest.raises(ConfigurationError, match="`c2` to be a finite number >= 0; found"):
        check_range("`c2`", value, at_least=0)
