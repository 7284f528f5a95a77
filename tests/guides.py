"""The pages docs/adding_a_*.md, followed literally in a copy of the repository."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
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


def follow(page, folder, kinds):
    """Copy the repository into ``folder``, and do the steps of a page, which are of these kinds."""
    for name in ("spectral_fairseq", "tests", "docs"):
        # With what is compiled, except what is just being written.
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.pyc.*"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    steps = FILE.findall(page.read_text("utf-8"))
    assert [kind for _, kind, _ in steps] == kinds
    for path, kind, code in steps:
        file = folder / path
        assert file.exists() == (kind == "diff"), path
        file.write_text(patched(file.read_text("utf-8"), code) if kind == "diff" else code, "utf-8")


def commands_of(page):
    """The one block of commands of a page."""
    (commands,) = COMMANDS.findall(page.read_text("utf-8"))
    return commands


def run_in(folder, command, env):
    """Run a command in the copy."""
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900)


def check_style(run):
    """Assert that ``run``, which takes a command, finds the copy in order."""
    pytest.importorskip("ruff")  # which `make lint` installs, and `make test` alone does not
    for tool in (["ruff", "check", "spectral_fairseq", "tests"], ["ruff", "format", "--check"]):
        done = run([sys.executable, "-m", *tool])
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
