"""The work folder of a run: its settings, its lock, stamps of finished steps, atomic writes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    Mapping,
    Optional,
)

from filelock import Timeout, UnixFileLock

from spectral_fairseq.errors import ConfigurationError, DataError
from spectral_fairseq.files import replacing


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: an interruption leaves the old file or the new one."""
    with replacing(path) as partial:
        partial.write_text(text, "utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON value atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


class InheritableLock(UnixFileLock):
    """A lock on a file that started programs can hold too."""

    def fileno(self) -> int:
        """The descriptor that holds the lock, to be passed to a started program."""
        descriptor = self._context.lock_file_fd
        assert descriptor is not None, "the lock is not held"
        return descriptor


@contextlib.contextmanager
def alone_with(record: Path, parser: argparse.ArgumentParser) -> Iterator[None]:
    """Keep other runs from a record, of which this one writes what it has read and what it adds.

    If another run has it, the program ends as with a wrong argument.
    """
    record.parent.mkdir(parents=True, exist_ok=True)
    lock = InheritableLock(record.with_suffix(".lock"), blocking=False)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_held(lock, f"that writes {record}", "Wait for it to end."))
        except ConfigurationError as error:
            parser.error(str(error))
        yield


@contextlib.contextmanager
def _held(lock: InheritableLock, other: str, remedy: str) -> Iterator[None]:
    try:
        lock.acquire()
    except Timeout:
        found = "one that holds its lock"
        raise ConfigurationError(f"no other run {other}", found, remedy) from None
    try:
        yield
    finally:
        lock.release()


def check_settings(
    folder: Path, before: Mapping[str, Any], settings: Mapping[str, Any], flag: str = "--work-dir"
) -> None:
    """Refuse settings that differ from those with which a folder was begun.

    Args:
        folder: the folder.
        before: its settings.
        settings: those of this run.
        flag: chooses the folder.

    Raises:
        ConfigurationError: some differ.
    """
    changed = [key for key in {**before, **settings} if before.get(key) != settings.get(key)]
    if changed:
        raise ConfigurationError(
            f"the settings with which {folder} was begun",
            "; ".join(f"{key} {before.get(key)!r} -> {settings.get(key)!r}" for key in changed),
            f"Give another {flag}, or the same options as before.",
        )


class WorkDir:
    """A folder in which every step is done once, however often a run is interrupted.

    Args:
        root: the folder; it is made when it does not exist.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = InheritableLock(root / ".lock", blocking=False)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the folder.

        Started programs inherit the lock, so that a training that outlives a killed run keeps
        a second one out of the same folder.

        Raises:
            ConfigurationError: another run is at work here, or it cannot be such a folder.
        """
        if os.pathsep in str(self.root):
            raise ConfigurationError(
                f"a work folder without {os.pathsep!r} in its name, where fairseq would split it",
                str(self.root),
                "Give another --work-dir.",
            )
        if self.root.exists() and not self.root.is_dir():
            raise ConfigurationError(f"a folder {self.root}", "a file", "Give another --work-dir.")
        self.root.mkdir(parents=True, exist_ok=True)
        with _held(self.lock, f"in {self.root}", "Wait for it to end, or give another --work-dir."):
            yield

    def keep_settings(
        self, settings: Dict[str, Any], unrecorded: Optional[Dict[str, Any]] = None
    ) -> None:
        """Record the settings, or compare them with the recorded ones.

        Args:
            settings: everything that determines a result.
            unrecorded: values of settings that older versions did not record.

        Raises:
            ConfigurationError: the folder belongs to a run with other settings, or its record
                cannot be read.
        """
        path = self.root / "settings.json"
        if not path.exists():
            write_json(path, settings)
            return
        try:
            before = {**(unrecorded or {}), **dict(json.loads(path.read_text("utf-8")))}
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"settings in {path}",
                "a file that is not JSON, or no settings",
                "Give another --work-dir, or remove that folder.",
            ) from None
        check_settings(self.root, before, settings)

    def need_space(self, needed: int) -> None:
        """Check that there is enough free space.

        Args:
            needed: free space in bytes.

        Raises:
            DataError: there is less.
        """
        free = shutil.disk_usage(self.root).free
        if free < needed:
            raise DataError(
                f"{needed / 1e6:.0f} MB of free disk space for {self.root}",
                f"{free / 1e6:.0f} MB",
                "Free some, or give a --work-dir on another disk.",
            )

    def is_done(self, name: str) -> bool:
        """Whether the step was finished, in this run or an earlier one."""
        return self._stamp(name).exists()

    def result(self, name: str) -> Dict[str, Any]:
        """The result of a finished step, with the ``seconds`` that it took."""
        return json.loads(self._stamp(name).read_text("utf-8"))

    def mark_done(self, name: str, result: Dict[str, Any]) -> None:
        """Record a finished step with its result."""
        self._stamp(name).parent.mkdir(exist_ok=True)
        write_json(self._stamp(name), result)

    def step(self, name: str, action: Callable[[], Dict[str, Any]]) -> Dict[str, Any]:
        """Run ``action`` unless it was finished before; returns its result in either case.

        Its ``seconds`` include those of failed attempts, except for attempts that were killed.
        """
        if not self.is_done(name):
            unfinished = f"{name}.unfinished"
            before = self.result(unfinished)["seconds"] if self.is_done(unfinished) else 0.0
            start = time.monotonic()

            def seconds() -> float:
                return round(before + time.monotonic() - start, 1)

            try:
                result = action()
            except BaseException:
                with contextlib.suppress(OSError):  # the disk may be full, which the caller reports
                    self.mark_done(unfinished, {"seconds": seconds()})
                raise
            self.mark_done(name, {**result, "seconds": seconds()})
        return self.result(name)

    def _stamp(self, name: str) -> Path:
        return self.root / "stamps" / f"{name}.json"
