"""docs/adding_a_penalty.md, followed literally in a copy of the repository."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.guides import ROOT, check_style, commands_of, follow, run_in

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "adding_a_penalty.md"
if not PAGE.exists():
    pytest.skip("the documentation is not beside these tests", allow_module_level=True)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A copy in which steps 1 to 3 are done."""
    folder = tmp_path_factory.mktemp("repository")
    follow(PAGE, folder, ["python", "python", "diff", "diff"])
    return folder


@pytest.fixture(scope="module")
def run(repository, fork_server):
    programs = repository / "bin"
    fork_server.write_programs(programs, "tests.fork_server:run_program", "python")

    def run_in_copy(command, **variables):
        folders = (programs, Path(sys.executable).parent, os.environ["PATH"])
        path = os.pathsep.join(map(str, folders))
        threads = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        env = {**os.environ, **threads, "PATH": path, "PYTHONPATH": str(repository), **variables}
        return run_in(repository, command, env)

    return run_in_copy


def test_the_commands_of_the_walk(run, repository, tiny_translation_data):
    done = run(["bash", "-euc", commands_of(PAGE)], DATA=str(tiny_translation_data))
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-6000:]
    assert " passed" in log
    shares = re.findall(r"\| train \|.* \| top_share ([\d.]+) \|", log)
    assert shares and all(0 < float(share) < 1 for share in shares)
    row = "| `--top-share-weight` | 0 | weight of sigma_1^2 / sum_k sigma_k^2, "
    assert row in (repository / "docs" / "flags.md").read_text("utf-8")


# What looks at every penalty, in both worlds; the commands of the walk look at every file.
CONCERNED = (
    *("tests/plugin/test_penalties.py", "tests/plugin/test_refusals.py"),
    *("tests/plugin/test_flags_page.py", "tests/training/test_penalties.py"),
)


def test_the_suite_holds_with_the_new_penalty(run):
    # Tests of other penalties alone, whose names are in brackets, have been run without it.
    selected = ("-m", "not slow", "-k", "top_share or not [")
    done = run(["python", "-m", "pytest", "-q", "-rA", *selected, *CONCERNED])
    assert done.returncode == 0, done.stdout[-6000:]
    for each in ("test_bad_values_are_refused[-1.0-top_share_weight]", "top_share_weight-svd]"):
        assert each in done.stdout


def test_its_style(run):
    check_style(run)
