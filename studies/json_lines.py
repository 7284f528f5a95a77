"""Records of trainings in one file, a JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Sequence

from filelock import UnixFileLock

from spectral_fairseq.files import replacing
from studies.corpus import split_lines


def read_records(path: Path) -> List[Dict[str, Any]]:
    """What has been recorded, in its order; nothing where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in split_lines(path.read_bytes())]


def add_records(path: Path, new: Sequence[Dict[str, Any]]) -> None:
    """Add records at the end; trainings that end at the same time wait for each other."""
    with UnixFileLock(path.with_suffix(".lock")), replacing(path) as partial:
        lines = [json.dumps(one, ensure_ascii=False) for one in (*read_records(path), *new)]
        partial.write_text("".join(f"{line}\n" for line in lines), "utf-8")
