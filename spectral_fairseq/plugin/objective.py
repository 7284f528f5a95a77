"""The terms that penalties add to the objective of an update, and what they know of a model.

Flags: ``--penalty-interval`` auto.

Note [The scale of a penalty]
-----------------------------
Worker w and micro-batch i contribute the gradient of their loss L_wi; fairseq divides the sum by
S, the sum of the sample sizes. With

    L_wi = nll_sum_wi + weight * R * sample_size_wi

the objective is (mean NLL per token) + weight * R exactly, whatever the batch size,
``--update-freq`` or number of workers. Without the factor a penalty would be thousands of times
too weak, and its strength would change with the batch.

Note [Prior of a plain table]
-----------------------------
An SVD table knows its prior. For a plain one, of any arch, the criterion takes the same four flags;
on a command line it shares them with the archs of this package. With an automatic c1 the prior has
the norm that the table started with. It is measured when it is first asked for, before the first
update, and kept in the extra state of checkpoints, so that a resumed run goes on with it.

Note [Lazy penalties]
---------------------
A penalty on a whole table costs the same whatever the batch: at N = 267,735 and d = 410 the N d^2
products of U'U, forward and again backward, are about a quarter of the softmax of 1,024 tokens,
and a gradient of N d numbers alone is 2 % of such a step. A table moves by far less than its own
size in a few updates, so for large N these penalties are computed every k-th update with k times
their weight: the gradient summed over k updates stays the same to first order. In between, the
logs show what was computed last: fairseq would show "None" for a key without a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from spectral_fairseq import refusals
from spectral_fairseq.embeddings import SVDEmbedding, Table
from spectral_fairseq.errors import ConfigurationError, arguments_as_flags, misspelt
from spectral_fairseq.functional.precision import widened
from spectral_fairseq.functional.word_counts import smoothed_log_counts
from spectral_fairseq.methods import prior
from spectral_fairseq.methods.penalties import (
    PENALTIES,
    OutputTable,
    Penalty,
    PerDevice,
    weight_and_excluded,
)
from spectral_fairseq.methods.prior import TablePrior
from spectral_fairseq.options import Option, arguments, flags_by_argument, read_options
from spectral_fairseq.plugin import find
from spectral_fairseq.plugin.counts import training_counts
from spectral_fairseq.plugin.table_and_head import uncounted_rows

# The flags of the prior of a table without factors.
_FLAGS_OF_PRIOR = flags_by_argument(prior.OPTIONS)
_FLAGS_OF_PRIOR["kind"] = _FLAGS_OF_PRIOR["prior"]


def prior_from_flags(cfg: Any) -> TablePrior:
    """The prior that a criterion's configuration describes, of a table yet to be seen.

    Raises:
        ConfigurationError: a value outside its range.
    """
    with arguments_as_flags(**_FLAGS_OF_PRIOR):
        found = prior.prior_of(arguments(prior.OPTIONS, cfg))
    return TablePrior(found, _FLAGS_OF_PRIOR)


class Words:
    """What penalties know of a target dictionary.

    Args:
        dictionary: the dictionary itself.
        task: the task in whose training data its special symbols are counted, if any.

    Attributes:
        rows: N, the number of rows of a table for it.
        excluded: indices of the rows that are not words: padding and ``madeupword`` fillers.
    """

    def __init__(self, dictionary: Any, task: Any = None) -> None:
        self.dictionary = dictionary
        self._task = task
        self.rows = len(dictionary)
        self.excluded = torch.tensor(uncounted_rows(dictionary))
        self._excluded = PerDevice(self.excluded)

    def excluded_on(self, device: torch.device) -> Tensor:
        """``excluded`` on the device of a table."""
        return self._excluded.on(device)

    @cached_property
    def log_counts(self) -> Tensor:
        """Smoothed log counts of the words in the training data, shape (N,).

        Raises:
            DataError: the dictionary has no counts.
        """
        return smoothed_log_counts(training_counts(self._task, self.dictionary))


@dataclass(frozen=True)
class Parts:
    """What a criterion works with in a model, found once.

    It holds the decoder, which is the model itself in some architectures: it lives as long as that.

    Attributes:
        decoder: the part that ends in the vocabulary.
        words: what is known of its dictionary.
        prior: the prior of its output table, where that knows none itself.
        svd_tables: all SVD tables of the model, each once however often it is shared.
        model_name: the name of the model's class, for messages.
    """

    decoder: nn.Module
    words: Words
    prior: TablePrior
    svd_tables: Tuple[SVDEmbedding, ...] = ()
    model_name: str = ""

    @cached_property
    def table(self) -> Optional[Table]:
        """The output table if it is a module of this package."""
        return find.table_module(self.decoder)

    @cached_property
    def output(self) -> find.OutputPlace:
        """Where the output table of any kind is.

        Raises:
            ConfigurationError: there is none.
        """
        return find.output_place(self.decoder, self.words.rows)


class DecoderTable(OutputTable):
    """The output table of a fairseq decoder at one update.

    Args:
        parts: what the model consists of.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.parts = parts
        self.decoder, self.words = parts.decoder, parts.words
        self.module, self.svd_tables = parts.table, parts.svd_tables

    @property
    def device(self) -> torch.device:
        """The device of the decoder."""
        return next(self.decoder.parameters()).device

    @property
    def excluded(self) -> Tensor:
        """See the base class."""
        return self.words.excluded_on(self.device)

    def weight(self) -> Tensor:
        """See the base class."""
        return widened(self.parts.output.matrix())

    def prior(self) -> Tensor:
        """See the base class."""
        return self.parts.prior(*self.get(weight_and_excluded))

    def refuse_without_svd_table(self) -> None:
        """See the base class."""
        raise ConfigurationError(
            "a model with an SVD table for `weight`",
            f"none in {self.parts.model_name}",
            "Use --embedding-type svd with an arch of this package, or drop `weight`.",
        )


class Term(NamedTuple):
    """One term of the objective: its key in the logs, its weight, and R, a float32 scalar."""

    name: str
    weight: float
    value: Tensor


LARGE_DICTIONARY = 65536
WORDS_PER_INTERVAL_STEP = 16384


def parse_interval(text: str) -> Optional[int]:
    """The number of updates that ``text`` says, ``None`` for ``auto``.

    Raises:
        ConfigurationError: ``text`` is neither ``auto`` nor a whole number from 1.
    """
    if text == "auto":
        return None
    if not str(text).isdecimal() or int(text) < 1:
        raise misspelt("`value` to be 'auto' or a whole number >= 1", text)
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


PENALTY_FLAGS = (*(flag for penalty in PENALTIES for flag in penalty.flags), PENALTY_INTERVAL)


class Penalties:
    """The penalties that a configuration turns on, of one model.

    Args:
        cfg: a configuration with the fields of :data:`PENALTY_FLAGS`.
        parts: what the model consists of.

    Raises:
        ConfigurationError: a flag is outside its range.
    """

    def __init__(self, cfg: Any, parts: Parts) -> None:
        self._parts = parts
        self._flags = read_options(PENALTY_FLAGS, cfg)
        self._active = [penalty for penalty in PENALTIES if penalty.factor(self._flags)]
        self._options: Dict[str, Any] = {}  # of those that were computed, completed for the words
        self._interval = self._flags.penalty_interval or interval_for(parts.words.rows)
        table = DecoderTable(parts)
        self._lazy = [penalty for penalty in self._active if penalty.lazy(table)]
        self._each_update = [penalty for penalty in self._active if penalty not in self._lazy]
        self._weights = {penalty.name: penalty.factor(self._flags) for penalty in self._active}
        for penalty in self._lazy:
            self._weights[penalty.name] *= self._interval
        self._last: Optional[List[Term]] = None if self._lazy else []

    @property
    def active(self) -> bool:
        """Whether there is any."""
        return bool(self._active)

    def __call__(self, updates: int) -> List[Term]:
        """The terms that are due.

        Args:
            updates: number of updates taken before this one.

        Raises:
            ConfigurationError: the model lacks what a penalty needs.
        """
        if not self._active:
            return []
        due = self._each_update if updates % self._interval else self._each_update + self._lazy
        terms = self._terms(due, DecoderTable(self._parts))
        lazy = terms[len(self._each_update) :]
        if lazy:
            self._last = [term._replace(value=term.value.detach()) for term in lazy]
        return terms

    def check(self, model: nn.Module) -> None:
        """Refuse a model that lacks what the penalties need, due or not, or does not train it.

        Raises:
            ConfigurationError: the model lacks what a penalty needs, or R depends on nothing that
                is trained.
            DataError: the dictionary lacks what a penalty needs.
        """
        tables = [module for module in model.modules() if isinstance(module, Table)]
        training = [table.training for table in tables]
        try:
            for table in tables:
                table.eval()  # a spectral-norm table goes on with its iteration in training
            output, terms = DecoderTable(self._parts), []
            for penalty in self._active:
                with torch.enable_grad(), arguments_as_flags(weight=penalty.weight.flag):
                    terms += self._terms([penalty], output)
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
            self._last = self._terms(self._lazy, DecoderTable(self._parts))
        return self._last

    def _terms(self, penalties: Iterable[Penalty], table: DecoderTable) -> List[Term]:
        return [
            Term(
                penalty.name,
                self._weights[penalty.name],
                penalty.of(table, self._options_of(penalty)),
            )
            for penalty in penalties
        ]

    def _options_of(self, penalty: Penalty) -> Any:
        # Not before it is computed: evaluation needs no counts, for which training data are read.
        if penalty.name not in self._options:
            completed = penalty.for_words(self._flags, self._parts.words)
            self._options[penalty.name] = completed
        return self._options[penalty.name]


ACTIVATION_NAMES = ("activation", "temporal_activation")


def reported_terms(net_output: Any) -> List[Term]:
    """The terms that a model computes on its own activations, AR and TAR; none for most models.

    They need activations that only the forward pass has, so a recurrent model returns them,
    weighted by flags of its own, as ``extra["activation_penalties"]``.
    """
    extra = net_output[1] if len(net_output) > 1 else None
    reported = extra.get("activation_penalties") if isinstance(extra, dict) else None
    if not reported:
        return []
    return [Term(name, weight, value) for name, (weight, value) in reported.items()]


# What likelihood_consistency.py and the z-loss measure, for each token.
R_DROP, SQUARED_LOG_Z = "r_drop", "z_loss"
TERM_NAMES = (*(penalty.name for penalty in PENALTIES), *ACTIVATION_NAMES, R_DROP, SQUARED_LOG_Z)
