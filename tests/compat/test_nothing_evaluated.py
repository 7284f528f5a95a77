"""fairseq-eval-lm refuses to give the perplexity of nothing."""

from __future__ import annotations

from pathlib import Path
from typing import List

import pytest

from tests.compat.fairseq_process import Failure, FairseqProcess


def batches(folder: str, flags: List[str], positions: int, context: int = 0) -> int:
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    parser = options.get_eval_lm_parser()
    args = options.parse_args_and_arch(parser, [folder, "--path", "x", *flags])
    task = tasks.setup_task(convert_namespace_to_omegaconf(args).task)
    task.load_dataset("valid")
    dataset = task.dataset("valid")
    return len(
        task.eval_lm_dataloader(
            dataset=dataset, max_tokens=600, max_positions=positions, context_window=context
        )
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, patched: FairseqProcess) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "text").write_text(" ".join(f"w{i % 20}" for i in range(511)) + "\n", "utf-8")
    pref = str(folder / "text")
    arguments = ["--only-source", "--trainpref", pref, "--validpref", pref]
    patched.cli("fairseq_cli.preprocess", *arguments, "--destdir", folder / "bin")
    return folder / "bin"


def test_all_pieces_are_too_long(bare: FairseqProcess, patched: FairseqProcess, text: Path) -> None:
    assert bare.call(batches, folder=str(text), flags=[], positions=256) == 0
    with pytest.raises(Failure, match="1, all skipped, with 512 tokens .*reads 256.*per-sample"):
        patched.call(batches, folder=str(text), flags=[], positions=256)


def test_pieces_that_fit(patched: FairseqProcess, text: Path) -> None:
    flags = ["--tokens-per-sample", "64"]
    assert patched.call(batches, folder=str(text), flags=flags, positions=256) > 0
    assert patched.call(batches, folder=str(text), flags=flags, positions=256, context=16) > 0
