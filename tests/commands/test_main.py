"""The command's frame: subcommands, errors without traceback, exit status."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import spectral_fairseq
from spectral_fairseq.commands import user_dir
from spectral_fairseq.commands.main import SUBCOMMANDS, main
from spectral_fairseq.errors import CheckpointError
from tests.checkpoints.made import cone, entries, save, with_padding


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"spectral-fairseq {spectral_fairseq.__version__}\n"


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_has_a_short_help_with_an_example(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"spectral-fairseq {name}" in lines[0]
    assert len(lines) <= 50 and max(map(len, lines)) <= 80
    assert len([line for line in lines if line.startswith("Example: ")]) == 1


def test_rare_options_are_shown_on_demand(capsys):
    shown = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as stop:
            main(["evaluate-lm", flag])
        assert stop.value.code == 0
        shown[flag] = capsys.readouterr().out
    for name in ("--dynamic-batches", "--no-verify", "--debug"):
        assert name not in shown["--help"] and name in shown["--help-all"]


SLOW = ("fairseq", "matplotlib", "numpy", "sacrebleu", "sklearn", "torch")
AT_ONCE = [
    (["--help"], 0),
    (["user-dir"], 0),
    (["analyze", "--help"], 0),
    (["evaluate-lm", "--help"], 0),
    (["analyze", "absent.pt"], 2),
    (["export", "absent.pt", "out.pt"], 2),
    (["evaluate-lm", "absent.pt", "d"], 2),
    (["next-words", "absent.pt", "--data", "d"], 2),
    (["score", "--ref", "absent.txt", "--sys", "absent.txt"], 2),
    (["average", "absent.pt", "--output", "out.pt"], 2),
]
IMPORTS = """
import json, sys
from spectral_fairseq.commands.main import main

for argv in json.loads(sys.argv[1]):
    try:
        status = main(argv)
    except SystemExit as stop:
        status = stop.code
    print("LOADED", status, *sorted(name for name in sys.modules if "." not in name))
"""


@pytest.mark.parametrize("commands, slow", [
    (AT_ONCE, SLOW),
    ([(["analyze", "one.pt"], 0)], ("fairseq", "matplotlib", "sacrebleu", "sklearn")),
    ([(["analyze", "one.npy"], 0)], ("fairseq", "matplotlib", "omegaconf", "pandas", "sacrebleu")),
], ids=["at once", "torch", "numpy"])  # fmt: skip
def test_only_what_is_needed_is_imported(commands, slow, tmp_path):
    save(tmp_path / "one.pt", entries(with_padding(cone())))
    np.save(tmp_path / "one.npy", cone().numpy())
    path = os.path.dirname(os.path.dirname(spectral_fairseq.__file__))
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, json.dumps([argv for argv, _ in commands])],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("LOADED")]
    for (argv, status), (found, *loaded) in zip(commands, said):
        assert int(found) == status and set(loaded).isdisjoint(slow), argv
    assert len(said) == len(commands)


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
    assert printed.err.startswith("spectral-fairseq export: error: expected a checkpoint or model")
    assert "none.pt" in printed.err and "Traceback" not in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("place", [0, 1, 3])
def test_debug_shows_the_traceback(place, tmp_path):
    argv = ["export", str(tmp_path / "none.pt"), str(tmp_path / "out.pt")]
    with pytest.raises(CheckpointError):
        main([*argv[:place], "--debug", *argv[place:]])


def test_a_defect_of_ours_is_not_taken_for_the_users(monkeypatch):
    def fail(args):
        raise KeyError("a bug")

    monkeypatch.setattr(user_dir, "run", fail)
    with pytest.raises(KeyError):
        main(["user-dir"])


def test_ctrl_c_is_no_traceback(monkeypatch, capsys):
    def stop(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(user_dir, "run", stop)
    assert main(["user-dir"]) == 130
    assert capsys.readouterr().err == "\nspectral-fairseq user-dir: interrupted\n"
    with pytest.raises(KeyboardInterrupt):
        main(["--debug", "user-dir"])


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_traceback():
    """As with ``spectral-fairseq doctor | head -0``."""
    reading, writing = os.pipe()
    os.close(reading)
    argv = [sys.executable, "-m", "spectral_fairseq.commands.main", "doctor"]
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv, redirection, status",
    [
        ("flags", "| true; exit ${PIPESTATUS[0]}", 141),
        ("user-dir", "> /dev/full", 2),
        ("user-dir", ">&-", 0),
    ],
)
def test_output_that_cannot_be_written_is_no_traceback(argv, redirection, status):
    path = os.path.dirname(os.path.dirname(spectral_fairseq.__file__))
    command = f"{sys.executable} -m spectral_fairseq.commands.main {argv} {redirection}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == status and b"Traceback" not in done.stderr
    assert (b"No space left" in done.stderr) == (status == 2)
