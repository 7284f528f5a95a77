import pickle

import pytest

from spectral_fairseq.errors import (
    ConfigurationError,
    DamagedError,
    DataError,
    arguments_as_flags,
    listed,
    printable,
)
from tests import messages


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


def test_some_of_many():
    assert listed([]) == "none" and listed(["a", 2]) == "a, 2"
    assert listed("abcd", 3, "; ") == "a; b; c; ..."


def test_the_wording_of_every_error_and_warning_is_the_one_that_was_reviewed():
    """The one place that pins wording; other tests ask for the type and the names in a message.

    After a change of a message: ``python -m tests.messages``, and read the difference.
    """
    assert messages.MESSAGES.read_text("utf-8") == messages.all_messages()
