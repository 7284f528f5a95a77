"""One small JSON file for each finished training, with its translations beside it, compressed."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional

from spectral_fairseq.files import replacing
from studies.corpus import split_lines
from studies.evidence.grid import Study
from studies.evidence.plan import Cell, Record
from studies.running import write_text


class Records(Mapping[str, Record]):
    """The records of a study by the names of their cells.

    Args:
        folder: receives ``NAME.json`` and ``NAME.en.xz``.
        plain_of: the folder of another study, whose records of plain are read as well.
    """

    def __init__(self, folder: Path, plain_of: Optional[Path] = None) -> None:
        self.folder = folder
        self.plain_of = plain_of
        shared = sorted(plain_of.glob("plain-*.json")) if plain_of else []
        self._records: Dict[str, Record] = {
            path.stem: json.loads(path.read_text("utf-8"))
            for path in (*shared, *sorted(folder.glob("*-*.json")))
        }

    def __getitem__(self, name: str) -> Record:
        return self._records[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def add(self, cell: Cell, figures: Mapping[str, Any], lines: Optional[List[str]]) -> None:
        """Keep the figures of a training and, if it translated the test set, its translations."""
        record = {
            "method": cell.method,
            "seed": cell.seed,
            "flags": cell.flags,
            "recipe": dict(cell.recipe),
            **figures,
        }
        if lines is not None:
            self.keep_text(cell.name, lines)
        # Written last: a record without its translations would never be completed.
        lines_of = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
        write_text(self.folder / f"{cell.name}.json", "{\n" + ",\n".join(lines_of) + "\n}\n")
        self._records[cell.name] = record

    def keep_text(self, name: str, lines: List[str], language: str = "en") -> None:
        """Write lines, compressed."""
        with replacing(self.folder / f"{name}.{language}.xz") as partial:
            partial.write_bytes(lzma.compress("".join(f"{x}\n" for x in lines).encode()))

    def text(self, name: str) -> List[str]:
        """The lines that were kept under a name."""
        path = self.folder / f"{name}.en.xz"
        if self.plain_of and not path.exists():
            path = self.plain_of / path.name
        return split_lines(lzma.decompress(path.read_bytes()))


def records_of(results: Path, name: str, study: Study) -> Records:
    """The records of a study, and those of plain that it shares."""
    return Records(results / name, results / study.plain_of if study.plain_of else None)
