"""A run that is resumed in a later epoch has the batches that it would have had.

fairseq composes the batches of most tasks once, from an order of the sentences that it draws by
the seed and the epoch in which it does so, and then only shuffles them from epoch to epoch. A
resumed run composes them in the epoch in which it goes on: other sentences come together than in
a run without interruption. fairseq 0.12.2 draws the order by the seed alone. With ``--update-
ordered-indices-seed`` the trainer of any fairseq adds the epoch to the seed.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable

from spectral_fairseq.compat.patching import Patch, replaces, wrapping

_BY_EPOCH = "_seed_follows_epoch"


@wrapping
def composing(self: Any, *args: Any, original: Callable[..., Any], **kwargs: Any) -> Any:
    """Wrap ``FairseqTask.get_batch_iterator``: batches for all epochs are those of the first."""
    call = inspect.signature(original).bind(self, *args, **kwargs)
    call.apply_defaults()
    values = call.arguments
    dataset, epoch = values["dataset"], values["epoch"]
    for_all_epochs = self.can_reuse_epoch_itr(dataset) and not (
        values.get("disable_iterator_cache") or values.get("update_epoch_batch_itr")
    )
    if epoch <= 1 or not for_all_epochs or dataset in self.dataset_to_epoch_iter:
        return original(self, *args, **kwargs)
    values["epoch"] = 1
    values["seed"] -= (epoch - 1) * getattr(self, _BY_EPOCH, False)
    iterator = original(*call.args, **call.kwargs)
    iterator.epoch = epoch
    dataset.set_epoch(epoch)
    return iterator


@wrapping
def telling(self: Any, *args: Any, original: Callable[..., Any], **kwargs: Any) -> Any:
    """Wrap ``Trainer.get_train_iterator``: the task knows whether the seed follows the epoch."""
    by_epoch = getattr(self.cfg.dataset, "update_ordered_indices_seed", False)
    setattr(self.task, _BY_EPOCH, bool(by_epoch))
    return original(self, *args, **kwargs)


BATCH_COMPOSITION = Patch(
    name="batch composition",
    reason="A run that is resumed in its second epoch or later sees other batches than an "
    "uninterrupted run.",
    install=replaces(
        {
            "fairseq.tasks.fairseq_task:FairseqTask.get_batch_iterator": composing,
            "fairseq.trainer:Trainer.get_train_iterator": telling,
        }
    ),
)
