"""The command's frame: subcommands, errors without traceback, exit status."""

import os
import subprocess
import sys

import pytest

import spectral_fairseq
from spectral_fairseq.cli import main as command
from spectral_fairseq.cli.main import main
from spectral_fairseq.errors import CheckpointError


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"spectral-fairseq {spectral_fairseq.__version__}\n"


def test_every_subcommand_has_help_and_a_run_function(capsys):
    subcommands = ["doctor", "export", "average", "user-dir"]
    for name in subcommands:
        with pytest.raises(SystemExit) as stop:
            main([name, "--help"])
        assert stop.value.code == 0
        assert f"spectral-fairseq {name}" in capsys.readouterr().out
    assert len(command.SUBCOMMANDS) >= len(subcommands)


@pytest.mark.parametrize("argv", [[], ["no-such-subcommand"]])
def test_usage_errors(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert "usage: spectral-fairseq" in capsys.readouterr().err


def test_an_error_is_one_message_without_traceback(tmp_path, capsys):
    assert main(["export", str(tmp_path / "none.pt"), str(tmp_path / "out.pt")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("spectral-fairseq export: error: expected a checkpoint file")
    assert "none.pt" in printed.err and "Traceback" not in printed.err
    assert printed.err.count("\n") == 1


def test_debug_shows_the_traceback(tmp_path):
    with pytest.raises(CheckpointError):
        main(["--debug", "export", str(tmp_path / "none.pt"), str(tmp_path / "out.pt")])


def test_a_defect_of_ours_is_not_taken_for_the_users(monkeypatch):
    def fail(args):
        raise KeyError("a bug")

    monkeypatch.setattr(command.user_dir, "run", fail)
    with pytest.raises(KeyError):
        main(["user-dir"])


def test_ctrl_c_is_no_traceback(monkeypatch, capsys):
    def stop(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.user_dir, "run", stop)
    assert main(["user-dir"]) == 130
    assert capsys.readouterr().err == "\nspectral-fairseq user-dir: interrupted\n"
    with pytest.raises(KeyboardInterrupt):
        main(["--debug", "user-dir"])


def test_a_reader_that_leaves_is_no_traceback():
    """As with ``spectral-fairseq doctor | head -0``."""
    reading, writing = os.pipe()
    os.close(reading)
    argv = [sys.executable, "-m", "spectral_fairseq.cli.main", "doctor"]
    path = os.path.dirname(os.path.dirname(spectral_fairseq.__file__))
    done = subprocess.run(
        argv, stdout=writing, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    os.close(writing)
    assert done.returncode == 141
    assert b"Traceback" not in done.stderr and b"BrokenPipe" not in done.stderr


def test_user_dir_alone_on_stdout_from_another_folder(run_cli, tmp_path):
    printed = run_cli("spectral-fairseq", "user-dir", cwd=tmp_path).stdout
    assert printed.count("\n") == 1
    folder = printed.strip()
    assert os.path.isabs(folder) and os.path.isfile(os.path.join(folder, "__init__.py"))
    assert os.path.samefile(folder, os.path.dirname(spectral_fairseq.__file__))
