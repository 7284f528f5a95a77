"""The finished trainings of a study: one line of JSON each, and their translations beside it.

A study has a folder with ``records.jsonl``, a line ``{"settings": {...}}`` for what determines all
results, then a line for each training, and, if it translates, ``texts.jsonl.xz``: a line
``{"name": ..., "language": ..., "lines": [...]}`` for the translations of each training, for their
reference and for their source.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from filelock import UnixFileLock

from spectral_fairseq.files import replacing
from studies.corpus import split_lines
from studies.evidence.grid import Study
from studies.evidence.plan import Cell, Record
from studies.work_folder import check_settings, write_text


class Records(Mapping[str, Record]):
    """The records of a study by the names of their cells.

    Args:
        folder: of the study.
        shared: the folders of other studies, whose records are read as well; of trainings that
            several have, the last one's is taken.
        methods: those of which they are read.
    """

    def __init__(
        self, folder: Path, shared: Sequence[Path] = (), methods: Sequence[str] = ("plain",)
    ) -> None:
        self.folder = folder
        self.shared = shared
        self._texts: Optional[Dict[Tuple[str, str], List[str]]] = None
        self._records: Dict[str, Record] = {}
        for other in shared:
            of = _read_records(other)[1]
            self._records.update({n: one for n, one in of.items() if one["method"] in methods})
        self._records.update(_read_records(folder)[1])

    def __getitem__(self, name: str) -> Record:
        return self._records[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def keep_settings(self, settings: Mapping[str, Any]) -> None:
        """Record the settings, or compare them with the recorded ones, those of plain as well.

        Raises:
            ConfigurationError: the records belong to a study with other settings.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for folder in (self.folder, *self.shared):
            if not folder.exists():
                continue
            before, records = _read_records(folder)
            if before is None:
                _write_lines(folder, settings, records)
            else:
                check_settings(folder, before, settings, "--results")

    def add(self, cell: Cell, figures: Mapping[str, Any], lines: Optional[List[str]]) -> None:
        """Keep the figures of a training and, if it translated the test set, its translations."""
        record = {
            "name": cell.name,
            "method": cell.method,
            "seed": cell.seed,
            "flags": cell.flags,
            "recipe": dict(cell.recipe),
            **figures,
        }
        # Other runs of the study may add records at the same time. The record is written last: one
        # without its translations would never be completed.
        with self._alone():
            if lines is not None:
                self._add_text(cell.name, lines)
            settings, records = _read_records(self.folder)
            _write_lines(self.folder, settings, {**records, cell.name: record})
        self._records[cell.name] = record

    def keep_text(self, name: str, lines: List[str], language: str = "en") -> None:
        """Keep lines under a name, compressed with those of the other trainings."""
        with self._alone():
            self._add_text(name, lines, language)

    def _alone(self) -> UnixFileLock:
        """Held while the files are read and written anew."""
        return UnixFileLock(self.folder / ".lock")

    def _add_text(self, name: str, lines: List[str], language: str = "en") -> None:
        texts = {**_read_texts(self.folder), (name, language): lines}
        rows = ({"name": one, "language": of, "lines": found} for (one, of), found in texts.items())
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        with replacing(self.folder / _TEXTS) as partial:
            partial.write_bytes(lzma.compress(data.encode()))
        self._texts = None

    def text(self, name: str) -> List[str]:
        """The lines that were kept under a name."""
        if self._texts is None:
            self._texts = {}
            for folder in (*self.shared, self.folder):
                self._texts.update(_read_texts(folder))
        return self._texts[name, "en"]


_RECORDS, _TEXTS = "records.jsonl", "texts.jsonl.xz"


def _read_records(folder: Path) -> Tuple[Optional[Mapping[str, Any]], Dict[str, Record]]:
    """The settings, None where none are recorded, and the records by their names."""
    path = folder / _RECORDS
    rows = list(map(json.loads, split_lines(path.read_bytes()))) if path.exists() else []
    settings = rows.pop(0)["settings"] if rows and "settings" in rows[0] else None
    return settings, {record["name"]: record for record in rows}


def _write_lines(
    folder: Path, settings: Optional[Mapping[str, Any]], records: Mapping[str, Record]
) -> None:
    # In the order of their names, so that the same trainings make the same file.
    rows: List[Mapping[str, Any]] = [] if settings is None else [{"settings": settings}]
    rows += [records[name] for name in sorted(records)]
    lines = (json.dumps(row, ensure_ascii=False) for row in rows)
    write_text(folder / _RECORDS, "".join(f"{line}\n" for line in lines))


def _read_texts(folder: Path) -> Dict[Tuple[str, str], List[str]]:
    path = folder / _TEXTS
    if not path.exists():
        return {}
    rows = map(json.loads, split_lines(lzma.decompress(path.read_bytes())))
    return {(row["name"], row["language"]): row["lines"] for row in rows}


def records_of(results: Path, name: str, study: Study) -> Records:
    """The records of a study, and those of others that it shares."""
    others = [results / one for one in (study.plain_of, study.finals_of) if one]
    return Records(results / name, others, study.shared)
