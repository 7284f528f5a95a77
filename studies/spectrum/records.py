"""The figures of finished trainings, in one JSON file that is written after each of them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any, Dict, List, Tuple

from studies.work_folder import write_text

Record = Dict[str, Any]
Key = Tuple[str, str, int]  # task, variant, seed


class Records:
    """The records of a file, which need not be there yet.

    Args:
        path: the JSON file: a list with one record on a line, so that changes are easy to review.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        found: List[Record] = json.loads(path.read_text("utf-8")) if path.exists() else []
        self._records = {(one["task"], one["variant"], one["seed"]): one for one in found}

    def __contains__(self, key: Key) -> bool:
        return key in self._records

    def add(self, record: Record) -> None:
        """Keep the figures of a training; threads may do this at the same time."""
        with self._lock:
            self._records[record["task"], record["variant"], record["seed"]] = record
            lines = ",\n".join(map(json.dumps, self.all()))
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, f"[\n{lines}\n]\n")

    def all(self) -> List[Record]:
        """The records, ordered by task, variant and seed."""
        return [self._records[key] for key in sorted(self._records)]
