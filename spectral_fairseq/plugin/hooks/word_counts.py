"""The counts of ``--gradient-gating`` in checkpoints, so that a training resumes with them.

A worker that has run out of batches repeats one and throws its gradient away: its words do not
count. Neither do those of a step that is not taken because its gradients overflow in half
precision; with ``--amp`` fairseq then takes the same batches again.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.plugin.criterions.penalised import PenalisedCrossEntropy
from spectral_fairseq.plugin.hooks.extra_state import kept_in_checkpoints


def _state_of(trainer: Any) -> Any:
    criterion = trainer.get_criterion()
    if not (isinstance(criterion, PenalisedCrossEntropy) and criterion.counts_words):
        return None
    memory = criterion.word_memory
    return memory.state_dict() if memory.has_counted else None


def _restore(trainer: Any, state: Any) -> None:
    criterion = trainer.get_criterion()
    if state is not None and isinstance(criterion, PenalisedCrossEntropy):
        criterion.word_memory.load_state_dict(state)


def _ignoring_repeats(prepare_sample: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(prepare_sample)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        sample, is_repeated = prepare_sample(self, *args, **kwargs)
        if isinstance(self.get_criterion(), PenalisedCrossEntropy):
            self.get_criterion().word_memory.ignored = is_repeated
        return sample, is_repeated

    return prepare


def _forgetting_overflows(train_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train_step)
    def begin_and_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        criterion = self.get_criterion()
        if isinstance(criterion, PenalisedCrossEntropy) and criterion.counts_words:
            criterion.word_memory.begin(self.get_num_updates())
        return train_step(self, *args, **kwargs)

    return begin_and_step


PATCH = Patch(
    name="counts of gradient gating",
    reason="--gradient-gating resumes with the words that it has counted.",
    install=replaces(
        {
            **kept_in_checkpoints("gradient_gating", _state_of, _restore),
            "fairseq.trainer:Trainer._prepare_sample": _ignoring_repeats,
            "fairseq.trainer:Trainer.train_step": _forgetting_overflows,
        }
    ),
)
