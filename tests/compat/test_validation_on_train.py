from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.conftest import train_arguments
from tests.compat.fairseq_process import FairseqProcess


def updates_of(path: str) -> int:
    import torch

    options = {"weights_only": False} if torch.__version__ >= "1.13" else {}
    return torch.load(path, **options)["optimizer_history"][-1]["num_updates"]


@pytest.mark.parametrize("which", ["bare", "patched"])
def test_all_epochs_are_trained(
    which: str, data: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    process: FairseqProcess = request.getfixturevalue(which)
    updates = []
    for subsets in ("valid", "valid,train"):
        more = ("--max-epoch", "3", "--valid-subset", subsets, "--no-epoch-checkpoints")
        folder = tmp_path / subsets
        process.cli("fairseq_cli.train", *train_arguments(data, folder, *more))
        updates.append(process.call(updates_of, path=str(folder / "checkpoint_last.pt")))
    assert (updates[0] == updates[1]) == (which == "patched")
