"""Every command that reads binarised data ends in one clear error where they are damaged."""

import re
import shutil

import pytest

from tests.compat.test_damaged_data import change, cut
from tests.conftest import PACKAGE, TINY_LANGUAGE_MODEL
from tests.language_models import STATEFUL, TIED, block_checkpoint, stateful_checkpoint


def longer(path, line):
    path.write_text(path.read_text("utf-8") + line + "\n", "utf-8")


# How a file is damaged, and what the error says.
DAMAGES = {
    "bin cut": ("valid.bin", cut, (-7,), "sentences within the"),
    "bin empty": ("valid.bin", cut, (0,), "within the 0 bytes"),
    "idx cut": ("valid.idx", cut, (-7,), "a wrong header or length"),
    "idx of bad magic": ("valid.idx", change, (0, "<B", 0), "an index of fairseq-preprocess"),
    "foreign token": ("valid.bin", change, (2, "<H", 9999), "words of the dictionary.*found 9999"),
    "huge count": ("dict.txt", longer, (f"new {10**30}",), "1000.* of 'new'"),
    "superscript count": ("dict.txt", longer, ("new \u00b2",), "of a word and its count"),
    "duplicate": ("dict.txt", longer, ("w1 3",), "Duplicate word"),
}
FEW = ["bin cut", "foreign token", "huge count"]


@pytest.fixture
def damaged(damage, tiny_lm_data, tmp_path):
    """A folder of data, the damaged file, and what the error says."""
    folder = shutil.copytree(tiny_lm_data, tmp_path / "data")
    name, damage_it, values, match = DAMAGES[damage]
    damage_it(folder / name, *values)
    return folder, name, match


def last_error(done, name, match):
    """The error is the last thing printed; there are no others before it in our own commands."""
    error = done.stderr.strip().splitlines()[-1]
    assert re.search(match, error) and name in error, done.stderr[-3000:]
    return error


@pytest.mark.parametrize(
    "command, damage",
    [
        *(("evaluate-lm", damage) for damage in DAMAGES),
        *(("analyze", damage) for damage in DAMAGES),
    ],
)
def test_our_commands(command, damaged, run_cli, train, tiny_lm_data):
    checkpoint = (stateful_checkpoint if command == "evaluate-lm" else block_checkpoint)(train)
    folder, name, match = damaged
    intact = tiny_lm_data / "dict.txt"
    data = (folder,) if "evaluate" in command else ("--data", folder, "--dict", intact)
    done = run_cli("spectral-fairseq", command, checkpoint, *data, rc=2)
    assert last_error(done, name, match).startswith(f"spectral-fairseq {command}: error")
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize("damage", FEW)
@pytest.mark.parametrize("task", ["stateful_language_modeling", "language_modeling"])
def test_training(task, damaged, run_cli, tmp_path):
    folder, name, match = damaged
    if task.startswith("stateful"):
        options = ("--arch", "awd_lstm_ptb", *STATEFUL)
    else:
        options = ("--arch", "transformer_lm_sc", TIED, *TINY_LANGUAGE_MODEL, "--task", task)
    done = run_cli(
        *("fairseq-train", folder, "--user-dir", PACKAGE, "--save-dir", tmp_path / "saved"),
        *(*options, "--optimizer", "adam", "--tokens-per-sample", "16", "--max-tokens", "96"),
        rc=1,
    )
    assert "DataError" in last_error(done, name, match)
    assert not list((tmp_path / "saved").glob("*"))
