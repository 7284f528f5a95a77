from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.fairseq_process import FairseqProcess, environment

_ABORT = -6

_STOP_EARLY = """
import sys
import torch
from fairseq.data import iterators

if sys.argv[1] == "patched":
    from spectral_fairseq.compat import patch_fairseq
    patch_fairseq()


class Batches:
    def __len__(self):
        return 100000

    def __iter__(self):
        for _ in range(len(self)):
            batch = torch.ones(64, 64)
            for _ in range(50):
                batch = torch.stack([batch[0]] * 64)
            yield batch


batches = iterators.BufferedIterator(10, Batches())
for _ in range(3):
    next(batches)
if sys.argv[2] == "error":
    raise KeyError("the run failed")
"""


def stop_early(kind: str, how: str = "end") -> int:
    command = [sys.executable, "-c", _STOP_EARLY, kind, how]
    return subprocess.run(command, env=environment(), capture_output=True).returncode


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python suspends such threads")
def test_fairseq_as_installed_aborts() -> None:
    assert any(stop_early("bare") == _ABORT for _ in range(10))  # it is a race


@pytest.mark.slow
def test_patched_fairseq_exits_cleanly() -> None:
    assert [stop_early("patched") for _ in range(2)] == [0, 0]


@pytest.mark.slow
def test_an_error_keeps_its_own_exit_status() -> None:
    assert stop_early("patched", "error") == 1


def everything() -> list:
    import torch
    from fairseq.data import iterators

    class Failing:
        def __len__(self) -> int:
            return 5

        def __iter__(self):  # type: ignore[no-untyped-def]
            yield from (torch.tensor(i) for i in range(3))
            raise OSError("disk")

    whole = [int(item) for item in iterators.BufferedIterator(2, [torch.tensor(i) for i in (4, 5)])]
    failing = iterators.BufferedIterator(2, Failing())
    seen = [int(next(failing)) for _ in range(3)]
    try:
        next(failing)
    except OSError as error:
        seen.append(str(error))
    return [whole, seen]


def test_batches_and_errors_still_arrive(patched: FairseqProcess) -> None:
    assert patched.call(everything) == [[4, 5], [0, 1, 2, "disk"]]


def stopped_while_full() -> bool:
    from fairseq.data import iterators

    from spectral_fairseq.compat.machines import stop_all

    batches = iterators.BufferedIterator(1, list(range(100)))
    next(batches)
    stop_all()
    return bool(batches._consumer.is_alive())


def test_a_thread_that_waits_for_room_is_stopped(patched: FairseqProcess) -> None:
    assert patched.call(stopped_while_full) is False


def test_max_update_through_the_command_line(data: Path, tmp_path: Path) -> None:
    from tests.compat.conftest import train_arguments

    user_dir = tmp_path / "patching_user_dir"
    user_dir.mkdir()
    (user_dir / "__init__.py").write_text(
        "from spectral_fairseq.compat import patch_fairseq\npatch_fairseq()\n"
    )
    arguments = train_arguments(data, tmp_path / "saved", "--max-update", "3", "--user-dir")
    command = [sys.executable, "-m", "fairseq_cli.train", *arguments, str(user_dir)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "saved" / "checkpoint_last.pt").exists()
