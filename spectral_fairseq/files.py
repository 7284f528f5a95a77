"""Files to read are regular files; files to write are written whole or not at all.

The package asks ``os.path`` what is at a path: the methods of ``Path`` raise where a folder above
it may not be searched, such as a colleague's home.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Iterator, List, Optional, Set, Type, Union

from spectral_fairseq.errors import (
    ConfigurationError,
    DamagedError,
    MissingDataError,
    OutputError,
    SpectralFairseqError,
    first_line,
)

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

_unfinished: Set[str] = set()


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
) -> str:
    """The content of a text file in UTF-8.

    Args:
        path: of the file.
        error: the class that is raised.
        remedy: what the user should do.

    Raises:
        DamagedError: it cannot be read, or is not text; or an error of the class that is given.
    """
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as why:
        raise error(f"a text file in UTF-8 at {path}", first_line(why), remedy) from why


@contextlib.contextmanager
def replacing(path: Union[str, os.PathLike[str]]) -> Iterator[Path]:
    """Yield a new empty file to fill, which takes the place of ``path`` at the end of the block.

    The new file lies in the same folder under a random name. It is removed if the block raises,
    and on SIGTERM and SIGHUP. Other programs see either the old file or the whole new one.

    Args:
        path: the file to write; of a link, what it points to is replaced.

    Raises:
        OutputError: there is a folder, a device or a pipe at ``path``.
        OSError: the system could not make, write or rename the file.
    """
    target = os.path.realpath(path)
    obstacle = why_not_readable(target)
    if obstacle is not None and os.path.exists(target):
        raise OutputError(
            f"a regular file, or none yet, at {path}", obstacle, "Choose another output file."
        )
    folder, name = os.path.split(target)
    # Not tempfile.mkstemp, whose files nobody else may read, whatever the umask says.
    partial = os.path.join(folder, f".{name[:32]}.{secrets.token_hex(8)}.tmp")
    with _removed_on_signals(partial):
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            yield Path(partial)
            os.fsync(descriptor)
            os.replace(partial, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
            raise
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def making_folder(path: Union[str, os.PathLike[str]]) -> Iterator[Path]:
    """Yield a new empty folder to fill, which takes the place of ``path`` at the end of the block.

    What was at ``path`` is removed then. The new folder lies beside it under a random name; it is
    removed if the block raises, and on SIGTERM and SIGHUP.

    Args:
        path: the folder to make; of a link, what it points to is replaced.

    Raises:
        OSError: the system could not make, write or rename it.
    """
    target = os.path.realpath(path)
    parent, name = os.path.split(target)
    partial, old = (
        os.path.join(parent, f".{name[:32]}.{secrets.token_hex(8)}.{kind}")
        for kind in ("tmp", "old")
    )
    with _removed_on_signals(partial):
        os.mkdir(partial)
        try:
            yield Path(partial)
            _share_like(partial)
            if os.path.isdir(target):
                os.replace(target, old)
            os.replace(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            if os.path.isdir(old):
                os.replace(old, target)
            raise
    shutil.rmtree(old, ignore_errors=True)


def _share_like(folder: str) -> None:
    """Let others read the files in a new folder as far as they may read the folder itself.

    Some libraries write files that nobody else may read, whatever the umask says.
    """
    mode = os.stat(folder).st_mode & 0o666
    for path in Path(folder).rglob("*"):
        if path.is_file():
            path.chmod(mode)


@contextlib.contextmanager
def _removed_on_signals(partial: str) -> Iterator[None]:
    """Remove ``partial`` when a signal ends the process, which runs no ``finally``."""
    replaced = []
    if threading.current_thread() is threading.main_thread():  # others may not set handlers
        # A handler of somebody else decides itself whether the process ends.
        replaced = [
            number for number in _ENDING_SIGNALS if signal.getsignal(number) is signal.SIG_DFL
        ]
    _unfinished.add(partial)
    for number in replaced:
        signal.signal(number, _remove_and_end)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)
        _unfinished.discard(partial)


def _remove_and_end(number: int, _: Optional[FrameType]) -> None:
    for partial in tuple(_unfinished):
        with contextlib.suppress(OSError):
            if os.path.isdir(partial):
                shutil.rmtree(partial)
            else:
                os.unlink(partial)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)  # so that the exit status tells the signal
