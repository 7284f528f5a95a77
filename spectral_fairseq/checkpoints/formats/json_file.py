"""JSON files that stand beside a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict

from spectral_fairseq.errors import DataError


def read_json(path: Path, kind: str) -> Any:
    """The content of a JSON file.

    Args:
        path: the file.
        kind: what it should be, for the error.

    Raises:
        DataError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{kind} in {path}", f"{type(error).__name__}: {str(error)[:200]}", "Copy it again."
        ) from error


def read_json_object(path: Path, kind: str) -> Dict[str, Any]:
    """The same for a file that holds an object.

    Raises:
        DataError: also if it holds anything else.
    """
    found = read_json(path, kind)
    if not isinstance(found, dict):
        raise DataError(f"{kind} in {path}", f"a {type(found).__name__}", "Copy it again.")
    return found
