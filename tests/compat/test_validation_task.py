from __future__ import annotations

from typing import List

import pytest

from tests.compat.fairseq_process import Failure, FairseqProcess


def parsed(command: str, flags: List[str]) -> str:
    import contextlib
    import io

    from fairseq import options

    parser = getattr(options, f"get_{command}_parser")()
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return str(options.parse_args_and_arch(parser, ["data", "--path", "x", *flags]).task)
    except SystemExit:
        return printed.getvalue()


def test_the_missing_flag_is_named(bare: FairseqProcess, patched: FairseqProcess) -> None:
    with pytest.raises(Failure) as caught:
        bare.call(parsed, command="validation", flags=[])
    assert caught.value.kinds[0] == "KeyError"
    assert "required: --task" in patched.call(parsed, command="validation", flags=[])


def test_other_commands_have_a_default(patched: FairseqProcess) -> None:
    given = ["--task", "language_modeling"]
    assert patched.call(parsed, command="validation", flags=given) == "language_modeling"
    assert patched.call(parsed, command="generation", flags=[]) == "translation"
    assert patched.call(parsed, command="eval_lm", flags=[]) == "language_modeling"
