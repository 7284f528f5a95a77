"""A second training of a process begins anew."""

from tests.compat.conftest import train_arguments


def train_both(first, second):
    """Two trainings of one process, as a grid of hydra has them."""
    import importlib
    import sys

    for arguments in (first, second):
        sys.argv = ["fairseq-train", *arguments]
        importlib.import_module("fairseq_cli.train").cli_main()


def test_a_second_training_begins_anew(which, process, data, tmp_path):
    """The second one does not learn: its first epoch is the best, and a patience of 2 ends it."""
    process.call(
        train_both,
        first=train_arguments(data, tmp_path / "a", "--max-epoch", "1", "--patience", "2"),
        second=train_arguments(
            *(data, tmp_path / "b", "--lr", "0", "--max-epoch", "9", "--patience", "2")
        ),
    )
    names = {"bare": ("1", "2", "_last"), "patched": ("1", "2", "3", "_last", "_best")}[which]
    found = {path.name for path in (tmp_path / "b").iterdir()}
    assert found == {f"checkpoint{name}.pt" for name in names}
