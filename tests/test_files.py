"""Files that are written whole or not at all."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path

import pytest

import spectral_fairseq
from spectral_fairseq.errors import OutputError
from spectral_fairseq.files import _prefix, making_folder, replacing


def test_the_file_appears_at_the_end_with_the_usual_permissions(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(path) as partial:
        partial.write_text("new")
        assert partial.parent == tmp_path and path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(error), replacing(path) as partial:
        partial.write_text("half")
        raise error
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_link_stays_and_what_it_points_to_is_written(tmp_path):
    (tmp_path / "disk").mkdir()
    link, target = tmp_path / "link", tmp_path / "disk" / "file"
    link.symlink_to(target)
    with replacing(link) as partial:
        partial.write_text("new")
    assert link.is_symlink() and target.read_text() == "new"


def test_no_file_or_link_that_lies_in_wait_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda count: "0")
    (tmp_path / "other").write_text("other")
    Path(f"{_prefix(str(tmp_path / 'file'))}0.tmp").symlink_to(tmp_path / "other")
    with pytest.raises(FileExistsError), replacing(tmp_path / "file") as partial:
        partial.write_text("new")
    assert (tmp_path / "other").read_text() == "other"


def test_names_are_not_predictable(tmp_path):
    with replacing(tmp_path / "file") as first, replacing(tmp_path / "file") as second:
        assert first != second


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_is_not_replaced(tmp_path, make):
    make(tmp_path / "it")
    with pytest.raises(OutputError, match="folder|pipe"), replacing(tmp_path / "it"):
        pass
    assert not (tmp_path / "it").is_file()


SLOW_WRITER = """
    import signal, sys, time
    from pathlib import Path
    from contextlib import ExitStack
    from spectral_fairseq.files import replacing

    # A process inherits which signals are ignored, as a shell's background jobs ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    with ExitStack() as several:
        for name in ("a", "b"):
            several.enter_context(replacing(Path(sys.argv[1]) / name)).write_text("half")
        print("written", flush=True)
        # A signal just before a long sleep would be handled after it.
        for _ in range(600):
            time.sleep(0.1)
"""


WRITER = """
    import sys
    from pathlib import Path
    from spectral_fairseq import files

    kind, path = sys.argv[1:]
    with getattr(files, kind)(Path(path)) as partial:
        (partial / "weights" if kind == "making_folder" else partial).write_text("from outside")
        print("written", flush=True)
        sys.stdin.readline()
"""


def writer(kind, path):
    """A process that has written to a file or folder, and waits for a line before it ends."""
    home = str(Path(spectral_fairseq.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), kind, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": home},
    )
    assert process.stdout.readline() == b"written\n"
    return process


@pytest.mark.parametrize("kind", [replacing, making_folder])
def test_what_a_killed_process_left_goes_with_the_next_save(tmp_path, kind):
    path = tmp_path / "it"
    killed, running = (writer(kind.__name__, path) for _ in range(2))
    killed.kill()
    killed.wait(30)
    assert len(list(tmp_path.iterdir())) == 2
    for _ in range(2):
        with kind(path):
            pass
        assert len(list(tmp_path.iterdir())) == 2  # this one's, and the running one's
    running.communicate(b"go on\n", 30)
    assert running.returncode == 0 and list(tmp_path.iterdir()) == [path]
    written = path / "weights" if kind is making_folder else path
    assert written.read_text() == "from outside"


def test_files_for_others_are_left_alone(tmp_path):
    start = os.path.basename(_prefix(str(tmp_path / "file")))
    others = [f"{start}tmp", f"{start}0123456789abcdef.txt", ".other.0123456789abcdef.tmp"]
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / f"{start}0123456789abcdef.tmp").touch()
    with replacing(tmp_path / "file"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "file"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_no_temporary_file(tmp_path, number):
    home = str(Path(spectral_fairseq.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SLOW_WRITER), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": home},
    )
    assert process.stdout.readline() == b"written\n"
    assert len(list(tmp_path.iterdir())) == 2
    process.send_signal(number)
    assert process.wait(30) == -number
    assert list(tmp_path.iterdir()) == []


INTERRUPTED_WRITER = """
    import os, signal, sys
    from pathlib import Path
    from spectral_fairseq.files import making_folder

    number, renames = int(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for one in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_DFL)
    rename, done = os.replace, []

    def interrupted(*names):
        rename(*names)
        done.append(names)
        if len(done) == renames:
            os.kill(os.getpid(), number)

    os.replace = interrupted
    with making_folder(sys.argv[1]) as folder:
        (folder / "weights").write_text("new")
"""


def interrupt(path, number, renames):
    """Replace a folder in a process that a signal ends after so many renames."""
    path.mkdir()
    (path / "weights").write_text("old")
    home = str(Path(spectral_fairseq.__file__).parents[1])
    process = subprocess.run(
        [
            *(sys.executable, "-c", textwrap.dedent(INTERRUPTED_WRITER)),
            *(str(path), str(int(number)), str(renames)),
        ],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": home},
        timeout=30,
    )
    assert process.returncode == -number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize(("renames", "kept"), [(1, "old"), (2, "new")])
def test_a_signal_between_two_renames_leaves_the_old_folder_or_the_new_one(
    tmp_path, number, renames, kept
):
    path = tmp_path / "it"
    interrupt(path, number, renames)
    assert (path / "weights").read_text() == kept and list(tmp_path.iterdir()) == [path]


def test_the_old_folder_is_put_back_after_a_kill_between_two_renames(tmp_path):
    """It was removed by the next folder of a name that began alike, and was the only copy."""
    path, other = (tmp_path / f"{'checkpoint_best_' * 2}{name}" for name in ("hf", "ct2"))
    interrupt(path, signal.SIGKILL, 1)
    assert not path.exists()
    with making_folder(other):
        pass
    with pytest.raises(KeyboardInterrupt), making_folder(path):
        raise KeyboardInterrupt
    assert (path / "weights").read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [other, path]


def test_the_new_file_has_the_permissions_of_the_old_one(tmp_path):
    (tmp_path / "file").touch(0o600)
    with replacing(tmp_path / "file") as partial:
        partial.write_text("new")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_handlers_are_those_of_before(tmp_path):
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)]
    with ExitStack() as several:
        for name in ("a", "b"):
            several.enter_context(replacing(tmp_path / name))
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)] == before


def test_files_of_a_new_folder_may_be_read_as_the_umask_says(tmp_path):
    """safetensors writes files that nobody else may read."""
    before = os.umask(0o027)
    try:
        with making_folder(tmp_path / "out") as folder:
            os.close(os.open(folder / "weights", os.O_WRONLY | os.O_CREAT, 0o600))
    finally:
        os.umask(before)
    assert (tmp_path / "out" / "weights").stat().st_mode & 0o777 == 0o640


def test_questions_about_paths_do_not_raise():
    """Path.is_dir() and the others do where a folder above the path may not be searched."""
    folder = Path(spectral_fairseq.__file__).parent
    asked = re.compile(r"\.(is_dir|is_file|exists|is_symlink)\(\)")
    found = [path for path in folder.rglob("*.py") if asked.search(path.read_text("utf-8"))]
    assert found == [folder / "files.py"]  # of a folder that it has just made
