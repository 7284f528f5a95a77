"""``--curriculum N`` shuffles from epoch N + 1 on.

fairseq reuses the data loader of the first epoch, and with it whether its batches
were shuffled.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, Optional

from spectral_fairseq.compat.patching import Patch, replaces


def _unneeded() -> Optional[str]:
    from fairseq.data.iterators import EpochBatchIterator

    reuses = "reuse_dataloader" in inspect.signature(EpochBatchIterator.__init__).parameters
    return None if reuses else "this fairseq makes a data loader for each epoch"


def shuffling(get_iterator: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``EpochBatchIterator._get_iterator_for_epoch``: each epoch has its own ``shuffle``."""

    @functools.wraps(get_iterator)
    def get(self: Any, epoch: int, shuffle: bool, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "dataloader", None) is not None:
            self.dataloader.batch_sampler.shuffle = shuffle
        return get_iterator(self, epoch, shuffle, *args, **kwargs)

    return get


PATCH = Patch(
    name="curriculum",
    reason="--curriculum leaves the batches in their order for the whole training.",
    install=replaces(
        {"fairseq.data.iterators:EpochBatchIterator._get_iterator_for_epoch": shuffling}
    ),
    unneeded=_unneeded,
)
