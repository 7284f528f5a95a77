"""Penalties in the training logs: R before its weight, under the name of the penalty.

A value is logged times the sample size, because fairseq adds up the logs of workers and
micro-batches. ``<name>_size`` is the weight of the value in averages over several updates.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List

from fairseq.logging import metrics

from spectral_fairseq.plugin.criterions.penalties import PENALTIES
from spectral_fairseq.plugin.criterions.penalties.activation import ACTIVATION_NAMES
from spectral_fairseq.plugin.criterions.penalties.penalty import Term

# What the likelihood terms measure, for each token; likelihood/consistency.py.
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
