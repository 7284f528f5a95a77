"""Files to read are regular files; files to write are written whole or not at all.

The package asks ``os.path`` what is at a path: the methods of ``Path`` raise where a folder above
it may not be searched, such as a colleague's home.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import stat
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Type, Union

from spectral_fairseq.errors import (
    COPY_AGAIN,
    ConfigurationError,
    DamagedError,
    MissingDataError,
    OutputError,
    SpectralFairseqError,
    check_type,
    first_line,
)

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

_unfinished: Dict[str, str] = {}  # path of what is being written -> the place that it will take


def why_not_readable(path: Union[str, os.PathLike[str]]) -> Optional[str]:
    """What is at ``path`` instead of a regular file, or None if there is one.

    Devices and pipes may have no end, and opening a pipe waits for a writer.
    """
    if os.path.isfile(path):
        return None
    if os.path.isdir(path):
        return "a folder"
    if os.path.exists(path):
        return "a device or a pipe"
    return "a link that leads nowhere" if os.path.islink(path) else "no such file"


def is_named_in_utf8(path: Union[str, os.PathLike[str]]) -> bool:
    """Whether a path is text, which libraries outside Python ask for; Python takes any bytes."""
    try:
        os.fspath(path).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def names_in(folder: Union[str, os.PathLike[str]]) -> List[str]:
    """Return the sorted names in a folder; none where it may not be listed.

    The files of such a folder can be read nevertheless.
    """
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def check_file(
    path: Union[str, os.PathLike[str]],
    what: str,
    remedy: str,
    error: Type[SpectralFairseqError] = MissingDataError,
) -> None:
    """Refuse a path at which no regular file is.

    Args:
        path: to read from.
        what: the file is.
        remedy: what the user should do.
        error: the class that is raised.

    Raises:
        MissingDataError: there is none; or an error of the class that is given.
    """
    obstacle = why_not_readable(path)
    if obstacle is not None:
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            obstacle = f"no such folder as {folder}"
        raise error(f"{what} at {path}", obstacle, remedy)


def check_directory(
    path: Union[str, os.PathLike[str]],
    what: str,
    remedy: str,
    error: Type[SpectralFairseqError] = MissingDataError,
) -> None:
    """As :func:`check_file`, of a folder."""
    if not os.path.isdir(path):
        found = "a file" if os.path.exists(path) else "no such folder"
        raise error(f"{what} at {path}", found, remedy)


def check_parent(out: Union[str, os.PathLike[str]], folder: Path) -> None:
    """Refuse to write ``out`` into a folder that is not there, or may not be written to.

    Raises:
        ConfigurationError: it may not.
    """
    check_directory(folder, f"a folder for {out}", "Create it first.", ConfigurationError)
    if not os.access(folder, os.W_OK | os.X_OK):
        found = f"{folder}, which cannot"
        remedy = "Change its permissions, or choose another output."
        raise ConfigurationError(f"a folder that can be written to for {out}", found, remedy)


def check_free(out: Union[str, os.PathLike[str]], found: str, overwrite: bool) -> None:
    """Refuse to replace what is at ``out``, if anything is found there, without ``--overwrite``.

    Raises:
        ConfigurationError: something would be replaced.
    """
    if found and not overwrite:
        remedy = "Add --overwrite to replace it, or choose another name."
        raise ConfigurationError(f"nothing at {out} yet", found, remedy)


def read_text(
    path: Path,
    error: Type[SpectralFairseqError] = DamagedError,
    remedy: str = "Correct its name or permissions, or save it again in UTF-8.",
    encoding: str = "utf-8-sig",
) -> str:
    """The content of a text file in UTF-8, without the mark that Windows puts in front.

    Args:
        path: of the file.
        error: the class that is raised.
        remedy: what the user should do.
        encoding: ``utf-8`` keeps the mark.

    Raises:
        DamagedError: it cannot be read, or is not text; or an error of the class that is given.
    """
    try:
        return path.read_text(encoding)
    except (OSError, UnicodeDecodeError) as why:
        raise error(f"a text file in UTF-8 at {path}", first_line(why), remedy) from why


def read_json(path: Path, kind: str) -> Any:
    """The content of a JSON file.

    Raises:
        DataError: it cannot be read, or is not JSON.
    """
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{kind} in {path}", first_line(error)) from error


def read_json_object(path: Path, kind: str) -> Dict[str, Any]:
    """The same for a file that holds an object.

    Raises:
        DataError: also if it holds anything else.
    """
    value = read_json(path, kind)
    check_type(value, dict, f"{kind} in {path}", COPY_AGAIN, DamagedError)
    return value


# Note [What a killed process leaves]
# -----------------------------------
# Nothing runs when the system kills a process, so that a file that it was writing stays. Each
# unfinished file or folder is therefore locked by its writer, and the next one that writes to the
# same place removes those of which the lock is free. An old folder whose place is empty goes back
# there: its process was killed between two renames. Two processes that write at once have names of
# their own, and leave each other's alone. Where the system has no such locks, nothing is removed.


@contextlib.contextmanager
def replacing(path: Union[str, os.PathLike[str]]) -> Iterator[Path]:
    """Yield a new empty file to fill, which takes the place of ``path`` at the end of the block.

    The new file lies in the same folder under a random name. It is removed if the block raises,
    and on SIGTERM and SIGHUP; see Note [What a killed process leaves]. Other programs see either
    the old file or the whole new one, which has the permissions of the old one.

    Args:
        path: the file to write; of a link, what it points to is replaced.

    Raises:
        OutputError: there is a folder, a device or a pipe at ``path``.
        OSError: the system could not make, write or rename the file.
    """
    target = os.path.realpath(path)
    _remove_leftovers(target)
    obstacle = why_not_readable(target)
    if obstacle is not None and os.path.exists(target):
        raise OutputError(
            f"a regular file, or none yet, at {path}", obstacle, "Choose another output file."
        )
    partial, descriptor = _begin(target, _make_file)
    with _undone_on_signals(partial, target):
        try:
            yield Path(partial)
            with contextlib.suppress(OSError):  # there is no old file, or a system without modes
                os.fchmod(descriptor, stat.S_IMODE(os.stat(target).st_mode))
            os.fsync(descriptor)
            os.replace(partial, target)
        except BaseException:
            _undo(partial, target)
            raise
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def making_folder(path: Union[str, os.PathLike[str]]) -> Iterator[Path]:
    """Yield a new empty folder to fill, which takes the place of ``path`` at the end of the block.

    What was at ``path`` is removed then. The new folder lies beside it under a random name. If the
    block raises, and on SIGTERM and SIGHUP, it is removed, and what was at ``path`` is there; see
    Note [What a killed process leaves].

    Args:
        path: the folder to make; of a link, what it points to is replaced.

    Raises:
        OSError: the system could not make, write or rename it.
    """
    target = os.path.realpath(path)
    _remove_leftovers(target)
    partial, descriptor = _begin(target, _make_folder)
    old = _set_aside(partial)
    with contextlib.ExitStack() as opened, _undone_on_signals(partial, target):
        opened.callback(os.close, descriptor)
        try:
            yield Path(partial)
            _share_like(partial)
            if os.path.isdir(target):
                replaced = os.open(target, os.O_RDONLY)
                opened.callback(os.close, replaced)
                _lock(replaced)
                os.replace(target, old)
            os.replace(partial, target)
        except BaseException:
            _undo(partial, target)
            raise
        shutil.rmtree(old, ignore_errors=True)


_NEW, _OLD = ".tmp", ".old"


def _set_aside(partial: str) -> str:
    """Where the old folder lies while the new one takes its place."""
    return f"{partial[: -len(_NEW)]}{_OLD}"


def _undo(partial: str, target: str) -> None:
    """Remove what was begun, after the old folder is back if nothing has taken its place."""
    old = _set_aside(partial)
    if os.path.isdir(old) and not os.path.lexists(target):
        os.replace(old, target)
    for path in (partial, old):
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _prefix(target: str) -> str:
    """How the names of what is written for a target begin; those of others differ."""
    folder, name = os.path.split(target)
    whole = hashlib.sha256(os.fsencode(name)).hexdigest()[:8]  # a name may be too long to add to
    return os.path.join(folder, f".{name[:32]}.{whole}.")


def _make_file(partial: str) -> int:
    # Not tempfile.mkstemp, whose files nobody else may read, whatever the umask says.
    return os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)


def _make_folder(partial: str) -> int:
    os.mkdir(partial)
    return os.open(partial, os.O_RDONLY)


def _begin(target: str, make: Callable[[str], int]) -> Tuple[str, int]:
    """Make and lock something new beside a target; its path and its descriptor."""
    while True:
        partial = f"{_prefix(target)}{secrets.token_hex(8)}{_NEW}"
        descriptor = make(partial)
        _lock(descriptor)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(partial), os.fstat(descriptor)):
                return partial, descriptor
        os.close(descriptor)  # another process took it for a leftover before it was locked


def _lock(descriptor: int) -> bool:
    """Lock what is open, unless another holds a lock; whether it is locked now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody else's, or a file system without locks
        return False
    return True


def _remove_leftovers(target: str) -> None:
    """Remove what killed processes have left for a target, or put it back if it is the only one."""
    folder, start = os.path.split(_prefix(target))
    unfinished = re.compile(rf"{re.escape(start)}[0-9a-f]{{16}}({_NEW}|{_OLD})")
    for name in filter(unfinished.fullmatch, names_in(folder)):
        place = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            is_folder = stat.S_ISDIR(os.lstat(place).st_mode)
            mode = os.O_RDONLY if is_folder else os.O_RDWR
            descriptor = os.open(place, mode | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if not _lock(descriptor):
                    continue
                if name.endswith(_OLD) and not os.path.lexists(target):
                    os.replace(place, target)
                else:
                    (shutil.rmtree if is_folder else os.unlink)(place)
            finally:
                os.close(descriptor)


def _share_like(folder: str) -> None:
    """Let others read the files in a new folder as far as they may read the folder itself.

    Some libraries write files that nobody else may read, whatever the umask says.
    """
    mode = os.stat(folder).st_mode & 0o666
    for path in Path(folder).rglob("*"):
        if path.is_file():
            path.chmod(mode)


@contextlib.contextmanager
def _undone_on_signals(partial: str, target: str) -> Iterator[None]:
    """Undo what was begun when a signal ends the process, which runs no ``finally``."""
    replaced = []
    if threading.current_thread() is threading.main_thread():  # others may not set handlers
        # A handler of somebody else decides itself whether the process ends.
        replaced = [
            number for number in _ENDING_SIGNALS if signal.getsignal(number) is signal.SIG_DFL
        ]
    _unfinished[partial] = target
    for number in replaced:
        signal.signal(number, _undo_and_end)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)
        del _unfinished[partial]


def _undo_and_end(number: int, _: Optional[FrameType]) -> None:
    for partial, target in tuple(_unfinished.items()):
        with contextlib.suppress(OSError):
            _undo(partial, target)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)  # so that the exit status tells the signal
