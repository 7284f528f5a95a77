"""JSON files that stand beside a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict

from spectral_fairseq.errors import (
    COPY_AGAIN,
    DamagedError,
    check_type,
    first_line,
)
from spectral_fairseq.files import read_text


def read_json(path: Path, kind: str) -> Any:
    """The content of a JSON file.

    Raises:
        DataError: it cannot be read, or is not JSON.
    """
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{kind} in {path}", first_line(error)) from error


def read_json_object(path: Path, kind: str) -> Dict[str, Any]:
    """The same for a file that holds an object.

    Raises:
        DataError: also if it holds anything else.
    """
    value = read_json(path, kind)
    check_type(value, dict, f"{kind} in {path}", COPY_AGAIN, DamagedError)
    return value
