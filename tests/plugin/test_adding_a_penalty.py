"""docs/adding_a_penalty.md, followed literally in a copy of the repository."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "adding_a_penalty.md"
if not PAGE.exists():
    pytest.skip("the documentation is not beside these tests", allow_module_level=True)

FILE = re.compile(r"^`(\S+)`\n\n```(python|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def patched(text, diff):
    """``text`` with each line marked + inserted behind the lines that precede it in ``diff``."""
    lines, at = text.splitlines(), None
    for line in diff.splitlines():
        if line.startswith("+"):
            at += 1
            lines.insert(at, line[1:])
        elif at is not None and lines[at + 1] == line[1:]:
            at += 1
        else:
            assert lines.count(line[1:]) == 1, f"not found once: {line[1:]}"
            at = lines.index(line[1:])
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A copy in which steps 1 to 3 are done."""
    folder = tmp_path_factory.mktemp("repository")
    for name in ("spectral_fairseq", "tests", "docs"):
        # With what is compiled, except what is just being written.
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.pyc.*"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    steps = FILE.findall(PAGE.read_text("utf-8"))
    assert [kind for _, kind, _ in steps] == ["python", "python", "diff", "diff"]
    for path, kind, code in steps:
        file = folder / path
        assert file.exists() == (kind == "diff"), path
        file.write_text(patched(file.read_text("utf-8"), code) if kind == "diff" else code, "utf-8")
    return folder


@pytest.fixture(scope="module")
def run(repository, fork_server):
    programs = repository / "bin"
    fork_server.write_programs(programs)

    def run_in_copy(command, **variables):
        folders = (programs, Path(sys.executable).parent, os.environ["PATH"])
        path = os.pathsep.join(map(str, folders))
        threads = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        env = {**os.environ, **threads, "PATH": path, "PYTHONPATH": str(repository), **variables}
        return subprocess.run(
            command, cwd=repository, env=env, capture_output=True, text=True, timeout=900
        )

    return run_in_copy


def test_the_commands_of_the_walk(run, repository, tiny_translation_data):
    (commands,) = COMMANDS.findall(PAGE.read_text("utf-8"))
    done = run(["bash", "-euc", commands], DATA=str(tiny_translation_data))
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-6000:]
    assert " passed" in log
    shares = re.findall(r"\| train \|.* \| top_share ([\d.]+) \|", log)
    assert shares and all(0 < float(share) < 1 for share in shares)
    row = "| `--top-share-weight` | 0 | weight of sigma_1^2 / sum_k sigma_k^2, "
    assert row in (repository / "docs" / "flags.md").read_text("utf-8")


# What looks at every penalty or at every file, in both worlds.
CONCERNED = (
    *("tests/test_architecture.py", "tests/test_errors.py"),
    *("tests/plugin/test_penalties.py", "tests/plugin/test_refusals.py"),
    *("tests/plugin/test_flags_page.py", "tests/training/test_penalties.py"),
)


def test_the_suite_holds_with_the_new_penalty(run):
    done = run([sys.executable, "-m", "pytest", "-q", "-rA", "-m", "not slow", *CONCERNED])
    assert done.returncode == 0, done.stdout[-6000:]
    for each in ("test_bad_values_are_refused[-1.0-top_share_weight]", "top_share_weight-svd]"):
        assert each in done.stdout


def test_its_style(run):
    pytest.importorskip("ruff")  # which `make lint` installs, and `make test` alone does not
    for tool in (["ruff", "check", "spectral_fairseq", "tests"], ["ruff", "format", "--check"]):
        done = run([sys.executable, "-m", *tool])
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
