from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.conftest import train_arguments
from tests.compat.fairseq_process import FairseqProcess


@pytest.mark.parametrize("which, last", [("bare", 5), ("patched", 3)])
def test_a_resumed_training_stops_when_it_would_have(
    which: str,
    last: int,
    data: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a rate of 0 the first validation is the best: a patience of 2 ends the third epoch."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # or the bare one cannot resume
    process: FairseqProcess = request.getfixturevalue(which)
    for epochs in ("2", "9"):
        more = ("--lr", "0", "--patience", "2", "--max-epoch", epochs)
        process.cli("fairseq_cli.train", *train_arguments(data, tmp_path, *more))
    assert (tmp_path / f"checkpoint{last}.pt").exists()
    assert not (tmp_path / f"checkpoint{last + 1}.pt").exists()
