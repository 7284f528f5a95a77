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
from tests.new_process import HOME

ENVIRONMENT = {**os.environ, "PYTHONPATH": HOME}


@pytest.fixture
def ends(capsys):
    """What is printed by a command line that ends without running a subcommand."""

    def run(*argv, rc=0):
        with pytest.raises(SystemExit) as stop:
            main([*argv])
        assert stop.value.code == rc
        printed = capsys.readouterr()
        return printed.err if rc else printed.out

    return run


def test_version(ends):
    assert ends("--version") == f"spectral-fairseq {spectral_fairseq.__version__}\n"


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_has_a_short_help_with_an_example(name, ends, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = ends(name, "--help").splitlines()
    assert f"spectral-fairseq {name}" in lines[0]
    assert len(lines) <= 50 and max(map(len, lines)) <= 80
    assert len([line for line in lines if line.startswith("Example: ")]) == 1


def test_rare_options_are_shown_on_demand(ends):
    common, all_options = ends("evaluate-lm", "--help"), ends("evaluate-lm", "--help-all")
    for name in ("--dynamic-batches", "--no-verify", "--debug"):
        assert name not in common and name in all_options


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


@pytest.mark.slow
@pytest.mark.parametrize("commands, slow", [
    (AT_ONCE, SLOW),
    ([(["analyze", "one.pt"], 0)], ("fairseq", "matplotlib", "sacrebleu", "sklearn")),
    ([(["analyze", "one.npy"], 0)], ("fairseq", "matplotlib", "omegaconf", "pandas", "sacrebleu")),
], ids=["at once", "torch", "numpy"])  # fmt: skip
def test_only_what_is_needed_is_imported(commands, slow, tmp_path):
    save(tmp_path / "one.pt", entries(with_padding(cone())))
    np.save(tmp_path / "one.npy", cone().numpy())
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, json.dumps([argv for argv, _ in commands])],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("LOADED")]
    for (argv, status), (found, *loaded) in zip(commands, said):
        assert int(found) == status and set(loaded).isdisjoint(slow), argv
    assert len(said) == len(commands)


@pytest.mark.parametrize("argv", [[], ["no-such-subcommand"]])
def test_usage_errors(argv, ends):
    assert "usage: spectral-fairseq" in ends(*argv, rc=2)


def test_an_unknown_flag_is_one_of_the_subcommand(ends):
    said = ends("evaluate-lm", "lm.pt", "data-bin", "--max-tokens", "5", rc=2)
    assert "usage: spectral-fairseq evaluate-lm [options] CKPT DATA" in said
    assert "spectral-fairseq evaluate-lm: error: unrecognized arguments: --max-tokens 5" in said


@pytest.mark.parametrize(
    "line",
    [
        "average [options] --output OUT CKPT ...",
        "flags [options] [TEXT]",
        "export [options] CKPT OUT",
    ],
)
def test_the_usage_has_what_must_be_given(line, capsys):
    with pytest.raises(SystemExit):
        main([line.split()[0], "--help"])
    assert f"usage: spectral-fairseq {line}\n" in capsys.readouterr().out


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
def test_the_package_is_the_command():
    argv = [sys.executable, "-m", "spectral_fairseq", "--version"]
    done = subprocess.run(argv, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.stdout == f"spectral-fairseq {spectral_fairseq.__version__}\n"


@pytest.mark.parametrize(
    "words, completed",
    [
        (["ana"], {"analyze"}),
        (["analyze", "--isotropy"], {"--isotropy-words", "--isotropy-runs"}),
        (["average", "--num"], {"--num-epoch-checkpoints", "--num-update-checkpoints"}),
        (["analyze", "check"], set()),  # left to the names of files
        (["", "--help"], set()),
    ],
)
def test_the_completion_of_bash(words, completed, capsys):
    assert main(["completion", "bash"]) == 0
    asked = " ".join(map(repr, ["spectral-fairseq", *words]))
    script = f"COMP_WORDS=({asked})\nCOMP_CWORD={len(words)}\n_spectral_fairseq\n"
    script = capsys.readouterr().out + script + 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert {*done.stdout.split()} == completed and done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", [(), ("-u",)])
def test_a_reader_that_leaves_is_no_traceback(unbuffered):
    """As with ``spectral-fairseq user-dir | head -0``, and with more than a buffer holds."""
    reading, writing = os.pipe()
    os.close(reading)
    argv = [sys.executable, *unbuffered, "-m", "spectral_fairseq.commands.main", "user-dir"]
    done = subprocess.run(argv, stdout=writing, stderr=subprocess.PIPE, env=ENVIRONMENT)
    os.close(writing)
    assert done.returncode == 141
    assert b"Traceback" not in done.stderr and b"BrokenPipe" not in done.stderr


def test_a_closed_stream_is_one_without_content(tmp_path, monkeypatch, capsys):
    """As with ``2>&-``: the bars ask for its methods, and print() takes None for stdout."""
    np.save(tmp_path / "table.npy", np.random.default_rng(0).normal(size=(30, 4)))
    argv = [tmp_path / "table.npy", "--format", "json", "--out", tmp_path / "o"]
    for name in ("stdin", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(["analyze", *map(str, argv)]) == 0
    assert json.loads(capsys.readouterr().out)["command"] == "analyze"
    assert sys.stdin.read() == ""


def test_user_dir_alone_on_stdout_from_another_folder(run_cli, tmp_path):
    printed = run_cli("spectral-fairseq", "user-dir", cwd=tmp_path).stdout
    assert printed.count("\n") == 1
    folder = printed.strip()
    assert os.path.isabs(folder) and os.path.isfile(os.path.join(folder, "__init__.py"))
    assert os.path.samefile(folder, os.path.dirname(spectral_fairseq.__file__))


@pytest.mark.slow
@pytest.mark.parametrize("redirection, status", [("> /dev/full", 2), (">&-", 0)])
def test_output_that_cannot_be_written_is_no_traceback(redirection, status):
    command = f"{sys.executable} -m spectral_fairseq.commands.main user-dir {redirection}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, env=ENVIRONMENT)
    assert done.returncode == status and b"Traceback" not in done.stderr
    assert (b"No space left" in done.stderr) == (status == 2)
