"""What penalties can be computed from, each a function of a model.

All are float32, and padding and ``madeupword`` rows are marked as excluded. A need raises
:class:`ConfigurationError` if the model lacks it; ```weight``` in the message stands for the flag
of the penalty that asked.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Callable, Dict, List, NamedTuple

import torch
from torch import Tensor, nn

from spectral_fairseq.embeddings import SVDEmbedding, WeightNormEmbedding
from spectral_fairseq.functional.products import row_norms as row_norms_of
from spectral_fairseq.functional.row_penalties import smoothed_log_counts
from spectral_fairseq.functional.spectra import singular_values as singular_values_of
from spectral_fairseq.plugin.criterions.penalties.per_device import PerDevice
from spectral_fairseq.plugin.models import output_table as find
from spectral_fairseq.plugin.models.tables import uncounted_rows
from spectral_fairseq.plugin.tasks.training_counts import training_counts


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


class ModelView:
    """A model at one update; what several penalties need of it is computed once.

    Args:
        module: the model, wrapped for data parallelism or not.
        words: of its target dictionary.
    """

    def __init__(self, module: nn.Module, words: Words) -> None:
        self.module = module
        self.words = words
        self._found: Dict[Need, Any] = {}

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.module.parameters()).device

    def get(self, need: Need) -> Any:
        """What ``need`` returns for this model."""
        if need not in self._found:
            self._found[need] = need(self)
        return self._found[need]


Need = Callable[[ModelView], Any]


class OutputTable(NamedTuple):
    """The table W of the softmax.

    Args:
        weight: W, shape (N, d).
        excluded: indices of the rows that are not counted, shape (m,).
    """

    weight: Tensor
    excluded: Tensor


class RowNorms(NamedTuple):
    """The norms of the rows of the output table.

    Args:
        norms: ||W_j||, shape (N,).
        excluded: indices of the rows that are not counted, shape (m,).
    """

    norms: Tensor
    excluded: Tensor


def output_table(view: ModelView) -> OutputTable:
    """The output table, of any kind; a factored one is multiplied out."""
    weight = find.output_table(view.module, view.words.rows).float()
    return OutputTable(weight, view.words.excluded_on(weight.device))


def row_norms(view: ModelView) -> RowNorms:
    """The norms of the rows of the output table, which a weight-norm table stores."""
    table = find.table_module(view.module)
    if isinstance(table, WeightNormEmbedding):
        return RowNorms(table.norms(), table.excluded_rows)
    weight, excluded = view.get(output_table)
    return RowNorms(row_norms_of(weight), excluded)


def singular_values(view: ModelView) -> Tensor:
    """The singular values of the output table, shape (d,); the learned ones of an SVD table."""
    table = find.table_module(view.module)
    if isinstance(table, SVDEmbedding):
        return table.singular_values()
    return singular_values_of(*view.get(output_table))


def svd_tables(view: ModelView) -> List[SVDEmbedding]:
    """All SVD tables of the model, each once however often it is shared; at least one."""
    return find.svd_tables(view.module)
