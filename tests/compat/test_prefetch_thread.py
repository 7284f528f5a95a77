"""The thread that loads batches ahead, when training stops in the middle of an epoch."""

import subprocess
import sys

import pytest

ABORT = -6
# Each run is a fork of a process that has imported fairseq, and ends as a process does. Whether
# fairseq as installed aborts is a race, which is run until it does.
_STOP_EARLY = f"""
import gc
import os
import sys
import torch
from fairseq.data import iterators

ABORT = {ABORT}
gc.freeze()  # a collection in every fork would copy the memory that they share


class Batches:
    def __len__(self):
        return 100000

    def __iter__(self):
        for _ in range(len(self)):
            batch = torch.ones(64, 64)
            for _ in range(50):
                batch = torch.stack([batch[0]] * 64)
            yield batch


statuses = []
for kind, how in [("bare", "end")] * 10 + [("patched", "end")] * 2 + [("patched", "error")]:
    if kind == "bare" and ABORT in statuses:
        continue
    if os.fork():
        statuses.append(os.waitstatus_to_exitcode(os.wait()[1]))
        print(kind, statuses[-1], flush=True)
        continue
    if kind == "patched":
        from spectral_fairseq.compat import patch_fairseq
        patch_fairseq()
    batches = iterators.BufferedIterator(1000, Batches())  # never full, so it goes on
    for _ in range(3):
        next(batches)
    if how == "error":
        raise KeyError("the run failed")
    sys.exit()
"""


@pytest.fixture(scope="module")
def exit_statuses(fork_server):
    """A list of those of fairseq as installed, and one of those of patched fairseq."""
    command, env = [sys.executable, "-c", _STOP_EARLY], fork_server.environment()
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True)
    of_kind = {"bare": [], "patched": []}
    for kind, status in map(str.split, done.stdout.decode().splitlines()):
        of_kind[kind].append(int(status))
    return of_kind


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python suspends such threads")
def test_fairseq_as_installed_aborts(exit_statuses):
    assert ABORT in exit_statuses["bare"]


def test_patched_fairseq_exits_cleanly_or_with_the_status_of_an_error(exit_statuses):
    assert exit_statuses["patched"] == [0, 0, 1]


def everything():
    import torch
    from fairseq.data import iterators

    class Failing:
        def __len__(self):
            return 5

        def __iter__(self):
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


def stopped_while_full():
    from fairseq.data import iterators

    from spectral_fairseq.compat.prefetch_thread import stop_all

    batches = iterators.BufferedIterator(1, list(range(100)))
    next(batches)
    stop_all()
    return bool(batches._consumer.is_alive())


def test_batches_and_errors_arrive_and_a_thread_that_waits_for_room_is_stopped(patched):
    patched.gives([[4, 5], [0, 1, 2, "disk"]], everything)
    patched.gives(False, stopped_while_full)
