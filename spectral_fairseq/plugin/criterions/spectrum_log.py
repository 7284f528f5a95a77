"""Measures of the output table's spectrum in the validation logs."""

from __future__ import annotations

import math
from typing import Any, Dict, List

import torch
from fairseq.logging import metrics

from spectral_fairseq.errors import arguments_as_flags
from spectral_fairseq.functional.linalg.gram import gram
from spectral_fairseq.functional.linalg.singular_values import singular_values_of_gram
from spectral_fairseq.functional.measures.mean_cosine import mean_cosine
from spectral_fairseq.functional.measures.spectrum_measures import spectrum_measures
from spectral_fairseq.plugin.criterions.penalties.needs import ModelView, output_table
from spectral_fairseq.plugin.criterions.updates import updates_of
from spectral_fairseq.plugin.flags import Flag, finite_nonnegative

LOG_SPECTRUM_INTERVAL = Flag(
    "log_spectrum_interval",
    0,
    "log measures of the output table's spectrum in validation, whenever that many updates have "
    "passed since the last time; 0 for never",
    finite_nonnegative,
)

# The number of workers that measured their table. All tables are equal, so sums are divided by it.
TABLES = "tables_measured"


class SpectrumLog:
    """Measures the output table, at most once in ``interval`` updates.

    Args:
        interval: in updates; 0 for never.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._measured_at = -math.inf

    def check(self, view: ModelView) -> None:
        """Refuse a model without a single output table, before training starts.

        Raises:
            ConfigurationError: there is nothing to measure.
        """
        if self.interval:
            with arguments_as_flags(weight=LOG_SPECTRUM_INTERVAL.option):
                view.get(output_table)

    @torch.no_grad()
    def __call__(self, view: ModelView) -> Dict[str, float]:
        """Entries of a logging output: the measures if they are due, else nothing."""
        now = updates_of(view.module)
        if not self.interval or now - self._measured_at < self.interval:
            return {}
        self._measured_at = now
        weight, excluded = view.get(output_table)
        sigma = singular_values_of_gram(gram(weight, excluded), weight.size(0) - excluded.numel())
        measures = {"mean_cosine": mean_cosine(weight, excluded), **spectrum_measures(sigma)}
        return {**{f"table_{name}": value for name, value in measures.items()}, TABLES: 1}


def reduce_spectrum(logging_outputs: List[Dict[str, Any]]) -> None:
    """Show the measures, from the logging outputs of all workers."""
    measured = sum(log.get(TABLES, 0) for log in logging_outputs)
    if measured:
        keys = {key for log in logging_outputs for key in log if key.startswith("table_")}
        for key in sorted(keys):
            total = sum(log.get(key, 0) for log in logging_outputs)
            metrics.log_scalar(key, total / measured, round=5)
