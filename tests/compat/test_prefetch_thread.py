"""The thread that loads batches ahead, when training stops in the middle of an epoch."""

import json
import subprocess
import sys

import pytest

_ABORT = -6
# Each run is a fork of a process that has imported fairseq, and ends as a process does. An abort is
# the last one.
_STOP_EARLY = """
import gc
import json
import os
import sys
import torch
from fairseq.data import iterators

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


for kind, how in json.loads(sys.argv[1]):
    if os.fork():
        status = os.waitstatus_to_exitcode(os.wait()[1])
        print(status, flush=True)
        if status == int(sys.argv[2]):
            break
        continue
    if kind == "patched":
        from spectral_fairseq.compat import patch_fairseq
        patch_fairseq()
    batches = iterators.BufferedIterator(10, Batches())
    for _ in range(3):
        next(batches)
    if how == "error":
        raise KeyError("the run failed")
    sys.exit()
"""


@pytest.fixture
def stop_early(fork_server):
    def exit_statuses(*runs):
        command = [sys.executable, "-c", _STOP_EARLY, json.dumps(runs), str(_ABORT)]
        env = fork_server.environment()
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True)
        return [int(status) for status in done.stdout.split()]

    return exit_statuses


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python suspends such threads")
def test_fairseq_as_installed_aborts(stop_early):
    assert _ABORT in stop_early(*[("bare", "end")] * 10)  # it is a race


def test_patched_fairseq_exits_cleanly_or_with_the_status_of_an_error(stop_early):
    runs = [("patched", "end"), ("patched", "end"), ("patched", "error")]
    assert stop_early(*runs) == [0, 0, 1]


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
