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

import torch
from fairseq.logging import metrics
from torch import nn

from spectral_fairseq import refusals
from spectral_fairseq.embeddings import Table
from spectral_fairseq.errors import ConfigurationError, arguments_as_flags
from spectral_fairseq.options import Option, read_options
from spectral_fairseq.plugin.penalties.catalogue import PENALTIES
from spectral_fairseq.plugin.penalties.view import Batch, ModelView, Parts, Penalty, Term

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


A_PENALTY = "a penalty, such as --cosreg-weight"
PENALTY_INTERVAL = Option(
    "penalty_interval",
    "auto",
    "compute the penalties on whole tables every k-th update, k times as strong; 'auto' is 1 up "
    "to 65,535 words and grows with the dictionary",
    parse=parse_interval,
    needs=(A_PENALTY,),
)


FLAGS = (*(flag for penalty in PENALTIES for flag in penalty.flags), PENALTY_INTERVAL)


class Penalties:
    """The penalties that a configuration turns on, of one model.

    Args:
        cfg: a configuration with the fields of :data:`FLAGS`.
        parts: of the model.

    Raises:
        ConfigurationError: a flag is outside its range.
        DataError: the dictionary lacks what a penalty needs.
    """

    def __init__(self, cfg: Any, parts: Parts) -> None:
        self._parts = parts
        self._flags = read_options(FLAGS, cfg)
        self._active = [penalty for penalty in PENALTIES if penalty.factor(self._flags)]
        self._options = {one.name: one.for_words(self._flags, parts.words) for one in self._active}
        self._interval = self._flags.penalty_interval or interval_for(parts.words.rows)
        view = ModelView(parts)
        self._lazy = [one for one in self._active if one.lazy(view)]
        self._each_update = [one for one in self._active if one not in self._lazy]
        self._last: Optional[List[Term]] = None if self._lazy else []

    @property
    def active(self) -> bool:
        """Whether there is any."""
        return bool(self._active)

    def __call__(self, updates: int, batch: Optional[Batch] = None) -> List[Term]:
        """The terms that are due.

        Args:
            updates: number of updates taken before this one.
            batch: of the update, for the penalties on hidden states.

        Raises:
            ConfigurationError: the model lacks what a penalty needs.
        """
        if not self._active:
            return []
        view = ModelView(self._parts, batch)
        due = self._terms(self._each_update, view)
        if updates % self._interval:
            return due
        lazy = self._terms(self._lazy, view)
        self._last = [term._replace(value=term.value.detach()) for term in lazy]
        return due + [term._replace(weight=term.weight * self._interval) for term in lazy]

    def check(self, model: nn.Module) -> None:
        """Refuse a model that lacks what the penalties need, due or not, or does not train it.

        Args:
            model: whose parts this object has.

        Raises:
            ConfigurationError: the model lacks what a penalty needs, or R depends on nothing that
                is trained.
        """
        tables = [module for module in model.modules() if isinstance(module, Table)]
        training = [table.training for table in tables]
        try:
            for table in tables:
                table.eval()  # a spectral-norm table goes on with its iteration in training
            view, terms = ModelView(self._parts), []
            for penalty in self._active:
                with torch.enable_grad(), arguments_as_flags(weight=penalty.weight.flag):
                    terms += self._terms([penalty], view)
        finally:
            for table, was in zip(tables, training):
                table.train(was)
        depends = {term.name: term.value.requires_grad for term in terms}
        for penalty in self._active:
            if not depends.get(penalty.name, True):
                raise refusals.FROZEN.error("a frozen one", penalty.weight.flag)
        self.last()

    @torch.no_grad()
    def last(self) -> List[Term]:
        """The lazy terms as they were computed last, for the logs.

        They are computed now if they never were, as in the first updates after training resumed.

        Raises:
            ConfigurationError: the model lacks what a penalty needs.
        """
        if self._last is None:
            self._last = self._terms(self._lazy, ModelView(self._parts))
        return self._last

    def _terms(self, penalties: Iterable[Penalty], view: ModelView) -> List[Term]:
        terms = []
        with torch.autocast(view.device.type, enabled=False):
            for penalty in penalties:
                found = view.get(penalty.needs)
                if found is None:
                    continue
                value = penalty.value(found, self._options[penalty.name])
                terms.append(Term(penalty.name, penalty.factor(self._flags), value))
        return terms


# Penalties that a recurrent model computes on its own activations: AR and TAR.
#
# Merity, McCann, Socher: "Revisiting Activation Regularization for Language RNNs", 2017,
# https://arxiv.org/abs/1708.01009. They need activations that only the forward pass has, so the
# model returns them, weighted by flags of its own, as ``extra["activation_penalties"]``.


ACTIVATION_NAMES = ("activation", "temporal_activation")


def reported_terms(net_output: Any) -> List[Term]:
    """The terms in a model's output; none for most models."""
    extra = net_output[1] if len(net_output) > 1 else None
    reported = extra.get("activation_penalties") if isinstance(extra, dict) else None
    return [Term(name, weight, value) for name, (weight, value) in (reported or {}).items()]


# Penalties in the training logs: R before its weight, under the name of the penalty.
#
# A value is logged times the sample size, because fairseq adds up the logs of workers and micro-
# batches. ``<name>_size`` is the weight of the value in averages over several updates.


# What the likelihood terms measure, for each token: likelihood/consistency.py, z_loss.py.
MEASURE_NAMES = ("r_drop", "simcut", "z_loss")
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
