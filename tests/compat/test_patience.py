"""A resumed training goes on counting for ``--patience``."""

from tests.compat.conftest import train_arguments


def test_a_resumed_training_stops_when_it_would_have(which, process, data, tmp_path, monkeypatch):
    """With a rate of 0 the first validation is the best: a patience of 2 ends the third epoch."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # or the bare one cannot resume
    for epochs in ("2", "9"):
        more = ("--lr", "0", "--patience", "2", "--max-epoch", epochs)
        process.cli("fairseq_cli.train", *train_arguments(data, tmp_path, *more))
    last = {"bare": 5, "patched": 3}[which]
    assert (tmp_path / f"checkpoint{last}.pt").exists()
    assert not (tmp_path / f"checkpoint{last + 1}.pt").exists()
