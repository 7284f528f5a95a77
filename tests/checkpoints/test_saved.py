"""Files that fairseq-train saves: whether one exists, and those of a run in order."""

import pytest

from spectral_fairseq.checkpoints.saved import checkpoint_file, saved_epochs
from spectral_fairseq.errors import CheckpointError


def test_a_run_is_followed_in_the_order_of_training(tmp_path):
    for which in ("2", "10", "_2_900", "_1_50", "1", "_best", "_last"):
        (tmp_path / f"checkpoint{which}.pt").touch()
    found = [path.stem for path in saved_epochs(tmp_path)]
    assert found == [f"checkpoint{which}" for which in ("_1_50", "1", "_2_900", "2", "10")]
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="at least one checkpoint<epoch>.pt"):
        saved_epochs(tmp_path / "empty")


def test_a_checkpoint_is_a_file(tmp_path):
    (tmp_path / "one.pt").touch()
    assert checkpoint_file(str(tmp_path / "one.pt")) == tmp_path / "one.pt"
    for path, found in ((tmp_path, "a folder"), (tmp_path / "two.pt", "no such file")):
        with pytest.raises(CheckpointError, match=f"found {found}"):
            checkpoint_file(path)
