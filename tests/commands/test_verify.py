"""A flipped bit is found by every subcommand, unless it is told not to look."""

import shutil

import pytest

from spectral_fairseq.commands.main import main
from tests.checkpoints.made import flipped
from tests.language_models import block_checkpoint

COMMANDS = {
    "analyze": ("{}",),
    "compare": ("{}", "{}"),
    "export": ("{}", "{}.out"),
    "average": ("{}", "--output", "{}.out"),
    "evaluate-lm": ("{}", "DATA", "--cpu"),
    "next-words": ("{}", "--data", "DATA", "--sentences", "DATA/sentences"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_damage_is_found_unless_told_otherwise(command, train, tiny_lm_data, tmp_path, capsys):
    path = tmp_path / "flipped.pt"
    shutil.copy(block_checkpoint(train), path)
    flipped(path, "data/0")
    data = tmp_path / "data"
    shutil.copytree(tiny_lm_data, data)
    (data / "sentences").write_text("w3 w1\n", "utf-8")
    argv = [one.format(path).replace("DATA", str(data)) for one in COMMANDS[command]]
    assert main([command, *argv]) == 2
    error = capsys.readouterr().err
    assert "checksum" in error and "see --no-verify" in error
    assert main([command, *argv, "--no-verify"]) == 0
