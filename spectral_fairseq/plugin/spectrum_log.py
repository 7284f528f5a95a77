"""Measures of the output table's spectrum in the validation logs: ``--log-spectrum-interval``.

Flags: ``--log-spectrum-interval`` 0.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Dict, List, Tuple
from weakref import WeakKeyDictionary

import torch
from fairseq.logging import metrics
from torch import Tensor, nn

from spectral_fairseq import refusals
from spectral_fairseq.errors import ConfigurationError, arguments_as_flags
from spectral_fairseq.functional.gram import table_gram
from spectral_fairseq.functional.spectra import singular_values_of_gram
from spectral_fairseq.methods.penalties import weight_and_excluded
from spectral_fairseq.options import Option
from spectral_fairseq.plugin.find import is_trained
from spectral_fairseq.plugin.objective import DecoderTable

logger = logging.getLogger(__name__)

LOG_SPECTRUM_INTERVAL = Option(
    "log_spectrum_interval",
    0,
    "log measures of the output table's spectrum in validation, whenever that many updates have "
    "passed since the last time; 0 for never",
    at_least=0,
)

# The number of workers that measured their table. All tables are equal, so sums are divided by it.
TABLES_MEASURED = "tables_measured"
_PREFIX = "table_"


class SpectrumLog:
    """Measures the output table of each model, at most once in ``interval`` updates; 0 is never."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._warned = False
        # Of each decoder its number of updates then, and the entries.
        self._latest: WeakKeyDictionary[nn.Module, Tuple[float, Dict[str, float]]] = (
            WeakKeyDictionary()
        )

    def check(self, table: DecoderTable) -> None:
        """Refuse a model without a single output table, before training starts.

        A warning says so where the table is not trained, so that its measures stay the same.

        Raises:
            ConfigurationError: there is nothing to measure.
        """
        if self.interval:
            with arguments_as_flags(weight=LOG_SPECTRUM_INTERVAL.flag):
                table.get(weight_and_excluded)
            if not is_trained(table.decoder, table.words.rows):
                logger.warning(
                    "%s measures an output table that is not trained: its measures stay the same",
                    LOG_SPECTRUM_INTERVAL.flag,
                )

    def check_metric(self, name: str) -> None:
        """Refuse a ``--best-checkpoint-metric`` that some or all validations lack.

        Raises:
            ConfigurationError: it is one of these measures, and ``interval`` is not 1; or it begins
                like them, and is none.
        """
        if name.startswith(_PREFIX) and name not in _names():
            raise ConfigurationError(
                f"a measure of {LOG_SPECTRUM_INTERVAL.flag} for --best-checkpoint-metric: "
                + ", ".join(_names()),
                name,
                "Choose one of them.",
            )
        if name.startswith(_PREFIX) and self.interval != 1:
            found = f"{LOG_SPECTRUM_INTERVAL.flag} {self.interval}"
            raise refusals.CHECKPOINT_METRIC.error(found, f"--best-checkpoint-metric {name}")

    @torch.no_grad()
    def __call__(self, table: DecoderTable, now: int) -> Dict[str, float]:
        """Entries of a logging output after so many updates: the measures if they are due."""
        if not self.interval:
            return {}
        before, entries = self._latest.get(table.decoder, (-math.inf, {}))
        if now == before:  # another batch of the same validation, maybe of another subset
            return dict(entries)
        if now - before < self.interval:
            return {}
        entries = {name: math.nan for name in _names()}
        try:
            entries = self._measured(*table.get(weight_and_excluded))
        except Exception as error:  # what is only logged ends no training
            if not self._warned:
                name = table.parts.model_name
                logger.warning("the spectrum of the output table of %s is nan: %s", name, error)
            self._warned = True
        entries[TABLES_MEASURED] = 1
        self._latest[table.decoder] = now, entries
        return dict(entries)

    def _measured(self, weight: Tensor, excluded: Tensor) -> Dict[str, float]:
        # In float64, as `analyze` does: float32 takes the small ones of a narrow cone for zero.
        from spectral_fairseq.functional.cosines import mean_cosine
        from spectral_fairseq.functional.ranks import spectrum_measures

        gram = table_gram(weight, excluded=excluded)
        sigma = singular_values_of_gram(gram, weight.size(0) - excluded.numel())
        measures = {"mean_cosine": mean_cosine(weight, excluded), **spectrum_measures(sigma)}
        return {f"{_PREFIX}{name}": value for name, value in measures.items()}


def _names() -> List[str]:
    from spectral_fairseq.functional.ranks import spectrum_measures

    return [f"{_PREFIX}{name}" for name in ("mean_cosine", *spectrum_measures(torch.ones(1)))]


def reduce_spectrum(logging_outputs: List[Dict[str, Any]]) -> None:
    """Show the measures; a logging output of at least one worker has them."""
    measured = sum(log.get(TABLES_MEASURED, 0) for log in logging_outputs)
    keys = {key for log in logging_outputs for key in log if key.startswith(_PREFIX)}
    for key in sorted(keys):
        total = sum(log.get(key, 0) for log in logging_outputs)
        metrics.log_scalar(key, total / measured, round=5)
