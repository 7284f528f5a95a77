"""Validation on the training split, ``--valid-subset valid,train``, leaves training alone.

fairseq keeps one iterator for each split. That of the training split is both trained and validated
on, so that each validation uses up an epoch of training.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

from spectral_fairseq.compat.patching import Patch, replaces


def apart(get_valid_iterator: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Trainer.get_valid_iterator``: the training split gets an iterator of its own."""

    @functools.wraps(get_valid_iterator)
    def get(self: Any, subset: str, disable_iterator_cache: bool = False) -> Any:
        trained_on = subset == self.cfg.dataset.train_subset
        return get_valid_iterator(self, subset, disable_iterator_cache or trained_on)

    return get


PATCH = Patch(
    name="validation on training data",
    reason="--valid-subset valid,train uses up epochs of training and still ends with status 0.",
    install=replaces({"fairseq.trainer:Trainer.get_valid_iterator": apart}),
)
