"""``--task translation_from_pretrained_bart``, of mBART's fine-tuning, trains and translates."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import pytest

from tests.compat.conftest import train_arguments
from tests.compat.fairseq_process import Failure, FairseqProcess

TASK = ("--task", "translation_from_pretrained_bart", "--langs", "de,en,fr", "--prepend-bos")


def arguments(data: Path, saved: Path) -> List[Any]:
    languages = ("--source-lang", "de", "--target-lang", "en")
    return train_arguments(data, saved, "--max-epoch", "1", *TASK, *languages)


def test_fairseq_alone_fails(bare: FairseqProcess, data: Path, tmp_path: Path) -> None:
    with pytest.raises(Failure, match="no attribute 'args'"):
        bare.cli("fairseq_cli.train", *arguments(data, tmp_path))


def test_training_and_translation(patched: FairseqProcess, data: Path, tmp_path: Path) -> None:
    patched.cli("fairseq_cli.train", *arguments(data, tmp_path))
    translate = (str(data), "--path", tmp_path / "checkpoint_last.pt", "--cpu", *TASK)
    more = ("--source-lang", "de", "--target-lang", "en", "--results-path", tmp_path / "results")
    patched.cli("fairseq_cli.generate", *translate, *more, "--beam", "2", "--max-len-b", "5")
    found = (tmp_path / "results" / "generate-test.txt").read_text("utf-8")
    assert found.count("\nH-") + found.startswith("H-") == 100
