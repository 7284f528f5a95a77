from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.compat.conftest import train_arguments
from tests.compat.fairseq_process import Failure, FairseqProcess

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is not None, reason="torch_xla is installed"
)


def test_bf16_trains(
    bare: FairseqProcess, patched: FairseqProcess, data: Path, tmp_path: Path
) -> None:
    arguments = train_arguments(data, tmp_path / "saved", "--max-epoch", "1", "--bf16")
    with pytest.raises(Failure):
        bare.cli("fairseq_cli.train", *arguments)
    assert not (tmp_path / "saved" / "checkpoint_last.pt").exists()
    patched.cli("fairseq_cli.train", *arguments)
    assert (tmp_path / "saved" / "checkpoint_last.pt").exists()


def parsed(flags: list) -> list:
    from fairseq import options

    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, ["data", "--arch", "lstm"] + flags)
    return [args.bf16, args.tpu]


def test_only_the_implied_tpu_is_undone(patched: FairseqProcess) -> None:
    assert patched.call(parsed, flags=["--bf16"]) == [True, False]
    assert patched.call(parsed, flags=["--bf16", "--tpu"]) == [True, True]
    assert patched.call(parsed, flags=["--tpu"]) == [False, True]
    assert patched.call(parsed, flags=[]) == [False, False]


@pytest.mark.parametrize("flags", [
    ["--bf16", "--fp16"],
    ["--memory-efficient-bf16", "--fp16"],
    ["--memory-efficient-fp16", "--bf16"],
])  # fmt: skip
def test_two_kinds_of_half_precision(
    flags: list, bare: FairseqProcess, patched: FairseqProcess
) -> None:
    with pytest.raises(Failure, match="TPU"):
        bare.call(parsed, flags=flags)
    with pytest.raises(Failure, match="expected one of --fp16 and --bf16") as caught:
        patched.call(parsed, flags=flags)
    assert caught.value.kinds[0] == "ConfigurationError"
    assert all(flag in caught.value.message for flag in flags)


def test_validation_parses_without_defaults(
    patched: FairseqProcess, data: Path, checkpoint: Path
) -> None:
    flags = ["--task", "translation", "--path", checkpoint, "--cpu", "--batch-size", 16]
    patched.cli("fairseq_cli.validate", data, *flags)
