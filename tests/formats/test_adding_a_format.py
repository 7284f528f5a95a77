"""docs/adding_a_format.md, followed literally in a copy of the repository."""

import os
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.guides import ROOT, check_style, commands_of, follow, run_in

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "adding_a_format.md"
# What looks at every format or at every file.
CONCERNED = ("tests/test_architecture.py", "tests/formats/test_opening.py")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a command in a copy in which steps 1 to 4 are done."""
    folder = tmp_path_factory.mktemp("repository")
    follow(PAGE, folder, ["python", "diff", "diff", "python"])
    python = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": python, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}

    return partial(run_in, folder, env=env)


def test_the_commands_of_the_walk(run):
    done = run(["bash", "-euc", commands_of(PAGE)])
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout and "a matrix of Kaldi" in done.stdout


def test_the_suite_holds_with_the_new_format(run):
    # Tests of other formats alone, whose names are in brackets, have been run without it.
    selected = ("-m", "not slow", "-k", "kaldi or not [")
    done = run([sys.executable, "-m", "pytest", "-q", *selected, *CONCERNED])
    assert done.returncode == 0, done.stdout[-6000:]


def test_its_style(run):
    check_style(run)
