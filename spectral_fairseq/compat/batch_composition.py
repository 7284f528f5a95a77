"""A run that is resumed in a later epoch has the batches that it would have had.

fairseq composes the batches of most tasks once, from an order of the sentences that it draws by the
seed and the epoch in which it does so, and then only shuffles them from epoch to epoch. A resumed
run composes them in the epoch in which it goes on: other sentences come together than in a run
without interruption. fairseq 0.12.2 draws the order by the seed alone. With
``--update-ordered-indices-seed`` the trainer adds the epoch to the seed as well.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, Optional

from spectral_fairseq.compat.patching import Patch, replaces

_BY_EPOCH = "_seed_follows_epoch"


def _unneeded() -> Optional[str]:
    from fairseq.tasks.fairseq_task import FairseqTask

    by_seed = "numpy_seed(seed):" in inspect.getsource(FairseqTask.get_batch_iterator)
    return "this fairseq draws the order by the seed alone" if by_seed else None


def composing(get_batch_iterator: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``FairseqTask.get_batch_iterator``: batches for all epochs are those of the first."""
    signature = inspect.signature(get_batch_iterator)

    @functools.wraps(get_batch_iterator)
    def get_as_in_the_first_epoch(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        values = given.arguments
        dataset, epoch = values["dataset"], values["epoch"]
        for_all_epochs = self.can_reuse_epoch_itr(dataset) and not (
            values.get("disable_iterator_cache") or values.get("update_epoch_batch_itr")
        )
        if epoch <= 1 or not for_all_epochs or dataset in self.dataset_to_epoch_iter:
            return get_batch_iterator(self, *args, **kwargs)
        values["epoch"] = 1
        values["seed"] -= (epoch - 1) * getattr(self, _BY_EPOCH, False)
        iterator = get_batch_iterator(*given.args, **given.kwargs)
        iterator.epoch = epoch
        dataset.set_epoch(epoch)
        return iterator

    return get_as_in_the_first_epoch


def telling(get_train_iterator: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Trainer.get_train_iterator``: the task knows whether the seed follows the epoch."""

    @functools.wraps(get_train_iterator)
    def tell_and_get(self: Any, *args: Any, **kwargs: Any) -> Any:
        by_epoch = getattr(self.cfg.dataset, "update_ordered_indices_seed", False)
        setattr(self.task, _BY_EPOCH, bool(by_epoch))
        return get_train_iterator(self, *args, **kwargs)

    return tell_and_get


PATCH = Patch(
    name="batch composition",
    reason="A run that is resumed in its second epoch or later sees other batches than an "
    "uninterrupted run.",
    install=replaces(
        {
            "fairseq.tasks.fairseq_task:FairseqTask.get_batch_iterator": composing,
            "fairseq.trainer:Trainer.get_train_iterator": telling,
        }
    ),
    unneeded=_unneeded,
)
