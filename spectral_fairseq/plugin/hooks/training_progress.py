"""Tell models where training stands, and let criterions look at them before it starts.

The host tells epochs to tasks, datasets and schedulers but to no module, and passes the number of
updates on to modules that ask for it without keeping it; some of its tasks, such as
``multilingual_translation``, do not even pass it on. Both are restored when training resumes.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

from fairseq.models import BaseFairseqModel
from fairseq.trainer import Trainer

from spectral_fairseq.compat.patching import replace


def _telling_epoch(begin_epoch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin_epoch)
    def begin_epoch_and_tell(self: Any, epoch: int) -> Any:
        result = begin_epoch(self, epoch)
        # Here rather than in the first step: the host would dump its state into crash.pt there.
        if hasattr(self.get_criterion(), "check_model"):
            self.get_criterion().check_model(self.get_model())
        if hasattr(self.get_model(), "check_criterion"):
            self.get_model().check_criterion(self.get_criterion())
        for module in self.get_model().modules():
            if hasattr(module, "set_epoch"):
                module.set_epoch(epoch)
        return result

    return begin_epoch_and_tell


def _keeping_updates(set_num_updates: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(set_num_updates)
    def set_and_keep(self: Any, num_updates: int) -> Any:
        self.num_updates = num_updates
        return set_num_updates(self, num_updates)

    return set_and_keep


def _telling_updates(train_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train_step)
    def tell_and_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        for module in self.get_model().modules():
            if isinstance(module, BaseFairseqModel):  # the model and, of several, each of them
                module.num_updates = self.get_num_updates()
        return train_step(self, *args, **kwargs)

    return tell_and_step


replace(Trainer, "begin_epoch", _telling_epoch)
replace(Trainer, "train_step", _telling_updates)
replace(BaseFairseqModel, "set_num_updates", _keeping_updates)
