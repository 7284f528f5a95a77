"""The terms that penalties add to the objective of an update.

Note [The scale of a penalty]
-----------------------------
Worker w and micro-batch i contribute the gradient of their loss L_wi; fairseq divides the sum by
S, the sum of the sample sizes. With

    L_wi = nll_sum_wi + weight * R * sample_size_wi

the objective is (mean NLL per token) + weight * R exactly, whatever the batch size,
``--update-freq`` or number of workers. Without the factor a penalty would be thousands of times
too weak, and its strength would change with the batch.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Optional
from weakref import WeakKeyDictionary

import torch
from fairseq.logging import metrics
from torch import nn

from spectral_fairseq import refusals
from spectral_fairseq.embeddings import Table
from spectral_fairseq.errors import ConfigurationError, arguments_as_flags
from spectral_fairseq.options import Option, given, read_options
from spectral_fairseq.plugin.models.find import decoder_of
from spectral_fairseq.plugin.penalties.catalogue import ACTIVATION_NAMES, PENALTIES
from spectral_fairseq.plugin.penalties.view import Batch, ModelView, Term, Words, updates_of

# How often the penalties on whole tables are computed.
#
# Note [Lazy penalties]
# ---------------------
# A penalty on a whole table costs the same whatever the batch: at N = 267,735 and d = 410 the N d^2
# products of U'U, forward and again backward, are about a quarter of the softmax of 1,024 tokens,
# and a gradient of N d numbers alone is 2 % of such a step. A table moves by far less than its own
# size in a few updates, so for large N these penalties are computed every k-th update with k times
# their weight: the gradient summed over k updates stays the same to first order. In between, the
# logs show what was computed last: fairseq would show "None" for a key without a value.


LARGE_DICTIONARY = 65536
WORDS_PER_INTERVAL_STEP = 16384


def parse_interval(text: str) -> Optional[int]:
    """The number of updates that ``text`` says, ``None`` for ``auto``.

    Raises:
        ConfigurationError: ``text`` is neither ``auto`` nor a whole number from 1.
    """
    if text == "auto":
        return None
    if not str(text).isdigit() or int(text) < 1:
        raise ConfigurationError(
            "`value` to be 'auto' or a whole number >= 1", repr(text), "Correct it."
        )
    return int(text)


def interval_for(num_words: int) -> int:
    """The automatic ``--penalty-interval`` for a dictionary of ``num_words``."""
    return 1 if num_words < LARGE_DICTIONARY else num_words // WORDS_PER_INTERVAL_STEP


PENALTY_INTERVAL = Option(
    "penalty_interval",
    "auto",
    "compute the penalties on whole tables every k-th update, k times as strong; 'auto' is 1 up "
    "to 65,535 words and grows with the dictionary",
    parse=parse_interval,
)


FLAGS = (*(flag for penalty in PENALTIES for flag in penalty.flags), PENALTY_INTERVAL)


class Penalties:
    """The penalties that a configuration turns on.

    Args:
        cfg: a configuration with the fields of :data:`FLAGS`.
        task: has the target dictionary of the models whose decoder does not have one of its own,
            and the training data in which special symbols are counted.

    Raises:
        ConfigurationError: a flag is outside its range.
        DataError: the dictionary lacks what a penalty needs.
    """

    def __init__(self, cfg: Any, task: Any) -> None:
        self._options = read_options(FLAGS, cfg)
        self._active = [penalty for penalty in PENALTIES if penalty.factor(self._options)]
        self._task, self._dictionary = task, task.target_dictionary
        self._words: Dict[int, Words] = {}
        self._of_words: Dict[Words, Dict[str, Any]] = {}
        self._options_for(self._words_of(self._dictionary))  # raises now rather than in an update
        self._last: WeakKeyDictionary[nn.Module, List[Term]] = WeakKeyDictionary()

    def __call__(self, model: nn.Module, batch: Optional[Batch] = None) -> List[Term]:
        """The terms that are due at this update.

        Args:
            model: to be penalised.
            batch: of the update, for the penalties on hidden states.

        Raises:
            ConfigurationError: the model lacks what a penalty needs.
        """
        view = self.view(model, batch)
        due = self._terms(view, lazy=False)
        interval = self._options.penalty_interval or interval_for(view.words.rows)
        if updates_of(model) % interval:
            return due
        lazy = self._terms(view, lazy=True)
        self._last[decoder_of(model)] = [term._replace(value=term.value.detach()) for term in lazy]
        return due + [term._replace(weight=term.weight * interval) for term in lazy]

    def check(self, model: nn.Module) -> None:
        """Refuse a model that lacks what the penalties need, due or not, or does not train it.

        Raises:
            ConfigurationError: the model lacks what a penalty needs, or R depends on nothing that
                is trained.
        """
        tables = [module for module in model.modules() if isinstance(module, Table)]
        training = [table.training for table in tables]
        try:
            for table in tables:
                table.eval()  # a spectral-norm table goes on with its iteration in training
            with torch.enable_grad():
                view = self.view(model)
                terms = [*self._terms(view, lazy=False), *self._terms(view, lazy=True)]
        finally:
            for table, was in zip(tables, training):
                table.train(was)
        depends = {term.name: term.value.requires_grad for term in terms}
        for penalty in self._active:
            if not depends.get(penalty.name, True):
                raise refusals.FROZEN.error("a frozen one", penalty.weight.flag)
        self.last(model)

    @torch.no_grad()
    def last(self, model: nn.Module) -> List[Term]:
        """The lazy terms as they were computed last, for the logs.

        They are computed now if they never were, as in the first updates after training resumed.

        Raises:
            ConfigurationError: the model lacks what a penalty needs.
        """
        decoder = decoder_of(model)
        if decoder not in self._last:
            self._last[decoder] = self._terms(self.view(model), lazy=True)
        return self._last[decoder]

    def idle_flags(self) -> Dict[str, str]:
        """Flags that were given although no penalty reads them -> the flags that they belong to."""
        idle = {
            option: penalty.weight.flag
            for penalty in PENALTIES
            if penalty not in self._active
            for option in given(penalty.settings, self._options)
        }
        if not self._active:
            needed = "a penalty, such as --cosreg-weight"
            idle.update(dict.fromkeys(given([PENALTY_INTERVAL], self._options), needed))
        return idle

    def view(self, model: nn.Module, batch: Optional[Batch] = None) -> ModelView:
        """The model with the dictionary of its decoder.

        A task for several target languages has a dictionary for each, of which it shows the
        criterion only the first.
        """
        own = getattr(decoder_of(model), "dictionary", None)
        return ModelView(model, self._words_of(self._dictionary if own is None else own), batch)

    def _words_of(self, dictionary: Any) -> Words:
        if id(dictionary) not in self._words:
            self._words[id(dictionary)] = Words(dictionary, self._task)
        return self._words[id(dictionary)]

    def _options_for(self, words: Words) -> Dict[str, Any]:
        """Name of a penalty -> its options, completed for a dictionary."""
        if words not in self._of_words:
            self._of_words[words] = {
                penalty.name: penalty.for_words(self._options, words) for penalty in self._active
            }
        return self._of_words[words]

    def _terms(self, view: ModelView, lazy: bool) -> List[Term]:
        options = self._options_for(view.words)
        terms = []
        with torch.autocast(view.device.type, enabled=False):
            for penalty in self._active:
                if penalty.lazy(view) is not lazy:
                    continue
                with arguments_as_flags(weight=penalty.weight.flag):
                    found = view.get(penalty.needs)
                    if found is None:
                        continue
                    value = penalty.value(found, options[penalty.name])
                terms.append(Term(penalty.name, penalty.factor(self._options), value))
        return terms


# Penalties in the training logs: R before its weight, under the name of the penalty.
#
# A value is logged times the sample size, because fairseq adds up the logs of workers and micro-
# batches. ``<name>_size`` is the weight of the value in averages over several updates.


# What the likelihood terms measure, for each token: likelihood/consistency.py.
MEASURE_NAMES = ("r_drop", "simcut")
NAMES = (*(penalty.name for penalty in PENALTIES), *ACTIVATION_NAMES, *MEASURE_NAMES)


def log_terms(due: Iterable[Term], last: Iterable[Term], sample_size: int) -> Dict[str, Any]:
    """Entries of a logging output.

    Args:
        due: the terms of this update.
        last: terms as they were computed last; those that are not due are shown, but have no
            weight in averages.
        sample_size: of the micro-batch.
    """
    entries: Dict[str, Any] = {}
    for terms, size in ((due, sample_size), (last, 0)):
        for term in terms:
            if term.name not in entries:
                entries[term.name] = term.value.detach() * sample_size
                entries[f"{term.name}_size"] = size
    return entries


def reduce_terms(logging_outputs: List[Dict[str, Any]]) -> None:
    """Show the R of each penalty, from the logging outputs of all workers and micro-batches."""
    for name in NAMES:
        logs = [log for log in logging_outputs if name in log]
        shown = sum(log["sample_size"] for log in logs)
        if shown > 0:
            total = sum(log[name] for log in logs)
            due = sum(log[f"{name}_size"] for log in logs)
            metrics.log_scalar(name, total / shown, due, round=5)
