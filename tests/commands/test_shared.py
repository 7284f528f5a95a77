"""What subcommands share: outputs written whole or refused, and checksums that are looked at."""

import os
import shutil

import pytest
import torch

from spectral_fairseq.commands.main import main
from spectral_fairseq.commands.shared import check_output, naming_full_disk, save_atomically
from spectral_fairseq.errors import ConfigurationError, OutputError
from tests.checkpoints.made import flipped
from tests.language_models import block_checkpoint


def test_a_folder_that_is_not_writable_is_refused_before_any_work(tmp_path, monkeypatch):
    # Not by its permissions, which do not bind a superuser.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(ConfigurationError, match="which cannot"):
        check_output(tmp_path / "out.pt", [], overwrite=False)
    (tmp_path / "inner").mkdir()
    assert check_output(tmp_path / "inner" / "out.pt", [], overwrite=False)


def test_a_link_stays_and_what_it_points_to_is_written(tmp_path):
    (tmp_path / "disk").mkdir()
    link, target = tmp_path / "link.pt", tmp_path / "disk" / "out.pt"
    link.symlink_to(target)
    for _ in range(2):
        save_atomically({"a": 1}, check_output(link, [], overwrite=True))
        assert link.is_symlink() and not target.is_symlink() and torch.load(target) == {"a": 1}
    assert sorted(tmp_path.rglob("*.pt")) == [target, link]
    with pytest.raises(ConfigurationError, match="no such folder"):
        astray = tmp_path / "astray.pt"
        astray.symlink_to(tmp_path / "absent" / "out.pt")
        check_output(astray, [], overwrite=True)


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


def test_a_full_disk_is_named_and_nothing_is_damaged(tmp_path, monkeypatch):
    """torch's writer reports a full disk as an error of its own."""
    out = tmp_path / "out.pt"
    save_atomically({"a": 1}, out)

    def full(*arguments, **options):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 128 vs 0")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OutputError, match="out.pt to be written; found no space left.*Free some"):
        save_atomically({"a": 2}, out)
    assert torch.load(out) == {"a": 1} and os.listdir(tmp_path) == ["out.pt"]


@pytest.mark.parametrize(
    "error, named",
    [
        (OSError(28, "No space left on device"), "No space left"),
        (RuntimeError("unexpected pos 128 vs 0"), "no space left"),
        (Exception("I/O error: No space left on device (os error 28)"), "No space left"),  # Rust's
        (RuntimeError("sizes differ"), None),
        (KeyError("name"), None),
    ],
)
def test_errors_of_writers_that_the_system_refused(error, named):
    raised = type(error) if named is None else OutputError
    with pytest.raises(raised, match=named and f"out to be written; found .*{named}.*elsewhere"):
        with naming_full_disk("out", "write elsewhere"):
            raise error
