from __future__ import annotations

from pathlib import Path
from typing import List

import pytest

from tests.compat.conftest import train_arguments
from tests.compat.fairseq_process import FairseqProcess


def train_both(first: List[str], second: List[str]) -> None:
    """Two trainings of one process, as a grid of hydra has them."""
    import importlib
    import sys

    for arguments in (first, second):
        sys.argv = ["fairseq-train", *arguments]
        importlib.import_module("fairseq_cli.train").cli_main()


@pytest.mark.parametrize("which, names", [("bare", "12"), ("patched", "123")])
def test_a_second_training_begins_anew(
    which: str, names: str, data: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The second one does not learn: its first epoch is the best, and a patience of 2 ends it."""
    process: FairseqProcess = request.getfixturevalue(which)
    process.call(
        train_both,
        first=train_arguments(data, tmp_path / "a", "--max-epoch", "1", "--patience", "2"),
        second=train_arguments(
            *(data, tmp_path / "b", "--lr", "0", "--max-epoch", "9", "--patience", "2")
        ),
    )
    expected = {f"checkpoint{epoch}.pt" for epoch in names} | {"checkpoint_last.pt"}
    expected |= {"checkpoint_best.pt"} if which == "patched" else set()
    assert {path.name for path in (tmp_path / "b").iterdir()} == expected
