"""Rows on the screen and in a file that is whole after each of them."""

from __future__ import annotations

import json
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List

from tabulate import tabulate

from benchmarks.harness import commit, versions
from spectral_fairseq.files import replacing


class Report:
    """The rows of a stage.

    Args:
        folder: where ``stage.json`` is written.
        stage: its name.
        minutes: after these no further row is begun.
    """

    def __init__(self, folder: Path, stage: str, minutes: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{stage}.json"
        self.rows: List[Dict[str, Any]] = []
        self.versions = {"commit": commit(), **versions()}
        self._end = time.monotonic() + 60 * minutes

    @property
    def seconds_left(self) -> float:
        """Until no further row is begun."""
        return self._end - time.monotonic()

    def add(self, measure: Callable[[], Dict[str, Any]], **row: Any) -> bool:
        """Add a row of what is measured and what ``measure`` returns, or of its error.

        Returns:
            False if there is no time left, and nothing was measured.
        """
        if self.seconds_left <= 0:
            print("The minutes are over.", flush=True)
            return False
        try:
            row.update(measure())
        except Exception as error:  # the other rows are worth having
            row.update(error=f"{type(error).__name__}: {error}"[:300], at=_place(error))
        self.rows.append(row)
        shown = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
        print(" ".join(shown), flush=True)
        with replacing(self.path) as file:
            file.write_text(json.dumps({"versions": self.versions, "rows": self.rows}, indent=1))
        return True


def _place(error: BaseException) -> str:
    """File and line of this package at which an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "spectral_fairseq" in f.filename] or frames
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"


def tables(folder: Path) -> str:
    """The rows of all stages as Markdown tables."""
    pages = []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text("utf-8"))
        what = ", ".join(f"{name} {value}" for name, value in found["versions"].items())
        table = tabulate(found["rows"], headers="keys", tablefmt="github", floatfmt=".4g")
        pages.append(f"## {path.stem}\n\n{what}\n\n{table}\n")
    return "\n".join(pages)
