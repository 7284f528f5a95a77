"""docs/adding_a_format.md, followed literally in a copy of the repository."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugin.test_adding_a_penalty import COMMANDS, FILE, patched

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "adding_a_format.md"
# What looks at every format or at every file.
CONCERNED = ("tests/test_architecture.py", "tests/test_errors.py", "tests/formats/test_opening.py")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a command in a copy in which steps 1 to 4 are done."""
    folder = tmp_path_factory.mktemp("repository")
    for name in ("spectral_fairseq", "tests", "docs"):
        # With what is compiled, except what is just being written.
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.pyc.*"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    steps = FILE.findall(PAGE.read_text("utf-8"))
    assert [kind for _, kind, _ in steps] == ["python", "diff", "diff", "python"]
    for path, kind, code in steps:
        file = folder / path
        assert file.exists() == (kind == "diff"), path
        file.write_text(patched(file.read_text("utf-8"), code) if kind == "diff" else code, "utf-8")
    python = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": python, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}

    def run_in_copy(*command):
        return subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=900
        )

    return run_in_copy


def test_the_commands_of_the_walk(run):
    (commands,) = COMMANDS.findall(PAGE.read_text("utf-8"))
    done = run("bash", "-euc", commands)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout and "a matrix of Kaldi" in done.stdout


def test_the_suite_holds_with_the_new_format(run):
    done = run(sys.executable, "-m", "pytest", "-q", "-m", "not slow", *CONCERNED)
    assert done.returncode == 0, done.stdout[-6000:]


def test_its_style(run):
    pytest.importorskip("ruff")  # which `make lint` installs, and `make test` alone does not
    for tool in (["ruff", "check", "spectral_fairseq", "tests"], ["ruff", "format", "--check"]):
        done = run(sys.executable, "-m", *tool)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
