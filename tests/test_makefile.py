"""The Makefile's own environment: no other folder is taken for it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).resolve().parents[1] / "Makefile"
if not MAKEFILE.exists() or shutil.which("make") is None:
    pytest.skip("the Makefile is not beside these tests, or no make", allow_module_level=True)


def make(folder, *arguments):
    # `make test VENV=...` would otherwise hand its own environment over, to be removed.
    make_own = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES")
    handed_over = (*make_own, "VENV", "CONSTRAINTS", "PYTHON", "FAIRSEQ")
    env = {key: value for key, value in os.environ.items() if key not in handed_over}
    return subprocess.run(
        ["make", "-f", str(MAKEFILE), *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def clone(tmp_path):
    for name in ("constraints.txt", "setup.py", "pyproject.toml", ".ci/groups.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in (
        "spectral_fairseq",
        "studies",
        "tests",
        "benchmarks",
        "examples",
    ):
        (tmp_path / name).mkdir()
    return tmp_path


def test_an_environment_of_somebody_else_is_not_removed(clone):
    (clone / "mine").mkdir()
    (clone / "mine" / "precious").touch()
    done = make(clone, "setup", "VENV=mine")
    assert done.returncode != 0 and "did not make" in done.stderr
    done = make(clone, "clean", "VENV=mine")
    assert done.returncode == 0 and "mine stays" in done.stdout
    assert (clone / "mine" / "precious").exists()


@pytest.mark.parametrize("mark", [".fairseq", ".made-by-make"])
def test_what_was_made_here_is_removed(mark, clone, monkeypatch):
    outer = clone / "outer"
    outer.mkdir()
    (outer / ".made-by-make").touch()
    monkeypatch.setenv("VENV", str(outer))
    (clone / ".venv").mkdir()
    (clone / ".venv" / mark).touch()
    assert make(clone, "clean").returncode == 0
    assert not (clone / ".venv").exists()
    assert outer.exists()


def test_an_interrupted_environment_is_known_as_made_here(clone):
    """A Python that fails to make the environment is stopped as by an interruption."""
    python = clone / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -m ] && kill -9 $PPID || exit 0\n')
    python.chmod(0o755)
    assert make(clone, "setup", f"PYTHON={python}").returncode != 0
    assert [path.name for path in (clone / ".venv").iterdir()] == [".made-by-make"]
    assert make(clone, "clean").returncode == 0 and not (clone / ".venv").exists()


def test_an_environment_of_another_python_is_not_taken_for_the_one_that_is_named(clone):
    """Nor is it removed: the name may be mistyped."""
    for name, version in ((".venv/bin/python", "3.11"), ("python3.10", "3.10")):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(f"#!/bin/sh\necho {version}\n")
        (clone / name).chmod(0o755)
    for mark in (".fairseq", ".installed"):
        (clone / ".venv" / mark).touch()
    done = make(clone, "setup", f"PYTHON={clone / 'python3.10'}")
    assert done.returncode != 0 and "found Python 3.11." in done.stderr
    assert make(clone, "setup", f"PYTHON={clone / '.venv/bin/python'}").returncode == 0
    assert make(clone, "setup").returncode == 0


def test_other_versions_are_installed_into_the_same_environment(clone):
    """Something may be running in it."""
    (clone / ".venv/bin").mkdir(parents=True)
    python = clone / ".venv/bin/python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {clone / "calls"}\nexit 0\n')
    python.chmod(0o755)
    for mark in (".made-by-make", ".fairseq", ".installed"):
        (clone / ".venv" / mark).touch()
        os.utime(clone / ".venv" / mark, (1, 1))
    assert make(clone, "setup").returncode == 0
    assert python.exists() and " install -c constraints.txt" in (clone / "calls").read_text()
    assert "wheel --no-deps" not in (clone / "calls").read_text()
    (clone / "calls").unlink()
    assert make(clone, "setup").returncode == 0 and not (clone / "calls").exists()


@pytest.mark.parametrize(
    "version, flags, expected",
    [
        ("3.12", (), True),
        ("3.12", ("FAIRSEQ=no",), False),
        ("3.13", (), False),
    ],
)
def test_fairseq_is_installed_where_it_has_a_build_and_is_wanted(version, flags, expected, clone):
    """A stand-in for Python answers the questions for its version and writes its calls down."""
    python = clone / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {clone / "calls"}\n'
        f'[ "$1" = -c ] && exec {sys.executable} -c "import sys; '
        f"sys.version_info = tuple(map(int, '{version}'.split('.'))); exec(sys.argv[1])\" \"$2\"\n"
        '[ "$2" = venv ] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python"\nexit 0\n'
    )
    python.chmod(0o755)
    done = make(clone, "setup", f"PYTHON={python}", *flags)
    assert done.returncode == 0, done.stderr
    calls = (clone / "calls").read_text()
    assert ("ve-fairseq" in calls) == ("and fairseq" in done.stdout) == expected
    assert "torch" in calls and ".ci/groups.py test" in calls and "[text,plots,export]" in calls
    done = make(clone, "quickstart", *flags)
    assert done.returncode != 0 and "expected fairseq in .venv" in done.stderr
