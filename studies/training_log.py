"""Read the log of fairseq-train: progress, perplexities, speed."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from spectral_fairseq.errors import DataError

_RECORD = re.compile(r"\| INFO \| (train_inner|train|valid) \| (\{.*\})\s*$")
_START = re.compile(r"\| INFO \| fairseq_cli\.train \| training on \d+ devices")


def log_record(line: str) -> Optional[Tuple[str, Dict[str, Any]]]:
    """(kind, figures) of a line of ``--log-format json``; None for any other line."""
    match = _RECORD.search(line)
    try:
        return (match.group(1), json.loads(match.group(2))) if match else None
    except ValueError:  # a full disk cut the line, and the next run appended to it
        return None


def log_records(path: Path) -> List[Tuple[str, Dict[str, Any]]]:
    """All (kind, figures) of a log, in their order."""
    lines = path.read_text("utf-8", "replace").split("\n")
    return [record for record in map(log_record, lines) if record is not None]


def starts(text: str) -> int:
    """How often a training was started or resumed, by the text of its log."""
    return len(_START.findall(text))


class TrainingProgress:
    """Progress of a training: its updates and latest perplexities."""

    def __init__(self) -> None:
        self.updates, self.ppl, self.valid_ppl = 0, "", ""

    def __call__(self, line: str) -> Optional[Tuple[int, str]]:
        """See :data:`studies.running.Progress`."""
        record = log_record(line)
        if record is None:
            return None
        kind, figures = record
        if kind == "train_inner":
            self.updates, self.ppl = int(figures["num_updates"]), f"ppl {figures['ppl']}"
        elif kind == "valid":
            self.valid_ppl = f", valid ppl {figures['valid_ppl']}"
        return self.updates, self.ppl + self.valid_ppl


def read_training_log(path: Path, metric: str = "loss") -> Dict[str, Any]:
    """Figures of a training, which may have been interrupted and resumed.

    Args:
        path: the log.
        metric: ``--best-checkpoint-metric`` of the training, of which less is better.

    Returns:
        ``valid_ppl`` of the best checkpoint and the update at which it was reached,
        ``seconds_per_update`` (median over intervals of ten updates, waiting for data included;
        over whole epochs where none had as many),
        ``updates``, and ``gpu_free_gb`` where there was a GPU.

    Raises:
        DataError: the log has no training or no validation in it.
    """
    records = log_records(path)
    steps, epochs, valid = (
        [figures for kind, figures in records if kind == wanted]
        for wanted in ("train_inner", "train", "valid")
    )
    rates = [float(step["ups"]) for step in steps if float(step.get("ups", 0)) > 0]
    if not rates:  # fewer than ten updates
        rates = [float(one["train_ups"]) for one in epochs if float(one.get("train_ups", 0)) > 0]
    if not rates or not valid:
        raise DataError(
            f"a training's log in {path}",
            f"{len(rates)} timed intervals, {len(valid)} validations",
            "Remove the work folder, or give another --work-dir, and train anew.",
        )
    # As fairseq does: of equal values, which are rounded as in the log, the latest is the best.
    best = min(reversed(valid), key=lambda figures: _or_infinite(figures[f"valid_{metric}"]))
    result = {
        "valid_ppl": round(_perplexity(float(best["valid_nll_loss"])), 3),
        "best_update": int(best["valid_num_updates"]),
        "updates": int(valid[-1]["valid_num_updates"]),
        "seconds_per_update": round(statistics.median(1 / rate for rate in rates), 4),
    }
    free = [float(step["gb_free"]) for step in steps if "gb_free" in step]
    return {**result, "gpu_free_gb": min(free)} if free else result


def _or_infinite(value: Any) -> float:
    """The value; infinity for NaN, which would count as the best if it came first."""
    number = float(value)
    return math.inf if math.isnan(number) else number


def _perplexity(bits: float) -> float:
    try:
        return 2.0**bits
    except OverflowError:
        return math.inf
