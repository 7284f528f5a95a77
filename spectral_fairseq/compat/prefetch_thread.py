"""A clean exit when training stops in the middle of an epoch.

Note [Why the exit aborted]
---------------------------
``BufferedIterator`` fills its queue from a daemon thread. When training stops before the epoch's
end (``--max-update``), nobody stops that thread. If it is inside torch when the interpreter shuts
down, CPython ends it at its next attempt to take the GIL, by unwinding a C++ stack that does not
expect it, and the process aborts (exit status 134) although everything was saved. So each thread
is asked to stop, and waited for, before the shutdown begins.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from typing import Any, Optional, Type

from spectral_fairseq.compat.patching import Patch, replaces

_POLL_SECONDS = 0.1
_JOIN_SECONDS = 30.0  # one batch at most has to be finished; never hang an exit on a dead disk

_running: weakref.WeakSet[Any] = weakref.WeakSet()


def _unneeded_prefetch_thread() -> Optional[str]:
    from fairseq.data import iterators

    can_stop = hasattr(iterators.BackgroundConsumer, "stop")
    return "this fairseq can stop its prefetch thread" if can_stop else None


def stop_all() -> None:
    """Stop every prefetch thread and wait for it."""
    consumers = list(_running)
    for consumer in consumers:
        consumer.stop()
    for consumer in consumers:
        if consumer.is_alive():
            consumer.join(_JOIN_SECONDS)


class _InterruptibleQueue:
    """The putting end of a queue, which ends its thread once a stop was asked for."""

    def __init__(self, target: queue.Queue[Any], stop: threading.Event) -> None:
        self._target = target
        self._stop = stop

    def put(self, item: Any) -> None:
        while not self._stop.is_set():
            try:
                return self._target.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
        # Ends the thread silently, and is not caught by fairseq's `except Exception`.
        raise SystemExit


def stoppable(consumer: Type[Any]) -> Type[Any]:
    """A subclass of fairseq's ``BackgroundConsumer`` that is stopped before the exit."""

    class StoppableConsumer(consumer):  # type: ignore[misc]
        """fairseq's prefetch thread, with a way to stop it. See Note [Why the exit aborted]."""

        def __init__(self, target: queue.Queue[Any], *args: Any, **kwargs: Any) -> None:
            self._stop_asked = threading.Event()
            super().__init__(_InterruptibleQueue(target, self._stop_asked), *args, **kwargs)
            _running.add(self)

        def stop(self) -> None:
            self._stop_asked.set()

    StoppableConsumer.__name__ = consumer.__name__
    StoppableConsumer.__qualname__ = consumer.__qualname__
    atexit.register(stop_all)
    return StoppableConsumer


PREFETCH_THREAD = Patch(
    name="prefetch thread",
    reason="Stopping in the middle of an epoch (--max-update) often aborts at exit with status "
    "134, because the thread that prefetches batches still runs.",
    install=replaces({"fairseq.data.iterators:BackgroundConsumer": stoppable}),
    unneeded=_unneeded_prefetch_thread,
)
