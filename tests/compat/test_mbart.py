"""mBART is fine-tuned and translates."""

import pytest

from tests.compat.conftest import train_arguments
from tests.compat.fairseq_process import Failure


def test_mbarts_task_trains_and_translates(bare, patched, data, tmp_path):
    """``--task translation_from_pretrained_bart``."""
    languages = ("--source-lang", "de", "--target-lang", "en")
    task = ("--task", "translation_from_pretrained_bart", "--langs", "de,en,fr", "--prepend-bos")
    training = train_arguments(data, tmp_path, "--max-epoch", "1", *task, *languages)
    with pytest.raises(Failure, match="no attribute 'args'"):
        bare.cli("fairseq_cli.train", *training)
    patched.cli("fairseq_cli.train", *training)
    translate = (str(data), "--path", tmp_path / "checkpoint_last.pt", "--cpu", *task, *languages)
    more = ("--results-path", tmp_path / "results", "--beam", "2", "--max-len-b", "5")
    patched.cli("fairseq_cli.generate", *translate, *more)
    found = (tmp_path / "results" / "generate-test.txt").read_text("utf-8")
    assert found.count("\nH-") + found.startswith("H-") == 100
