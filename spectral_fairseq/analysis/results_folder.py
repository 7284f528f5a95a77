"""A folder of results: each file whole or not at all, pictures, JSON and, last, the page."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Dict, Iterable, Mapping, Sequence, Union

from spectral_fairseq.analysis.drawing import FILES, Picture
from spectral_fairseq.analysis.plots import OCCASIONAL
from spectral_fairseq.analysis.report import as_html, encoded
from spectral_fairseq.analysis.text import as_text
from spectral_fairseq.errors import (
    ConfigurationError,
    OutputError,
)
from spectral_fairseq.files import check_free, check_parent, replacing

PAGE = "report.html"
TEXT, DOCUMENT = "measures.txt", "analysis.json"


def check_folder(out: Union[str, Path], overwrite: bool) -> Path:
    """Refuse an unusable output folder before any work is done; returns it as a path."""
    folder = Path(out)
    if os.path.lexists(folder) and not os.path.isdir(folder):
        found = "a file" if os.path.exists(folder) else "a link to nothing"
        raise ConfigurationError(f"a folder for {out}", found, "Choose another name for --out.")
    parent = folder.absolute().parent
    check_parent(f"--out {out}", folder if os.path.isdir(folder) else parent)
    found = "a folder with files in it" if os.path.isdir(folder) and any(folder.iterdir()) else ""
    check_free(f"--out {out}", found, overwrite)
    return folder


def check_inputs_stay(folder: Path, inputs: Iterable[Union[str, Path]]) -> None:
    """Refuse an output folder in which the report would replace a file that is read."""
    written = {(folder / name).resolve() for name in (PAGE, TEXT, DOCUMENT)}
    for path in map(Path, inputs):
        if path.resolve() in written:
            wanted = f"an input that the report in {folder} does not replace"
            raise ConfigurationError(wanted, str(path), "Rename it, or choose another folder.")


def write_results(
    out: Path, document: Mapping[str, Any], pictures: Sequence[Picture]
) -> Dict[str, Path]:
    """Write all files under other names first, then rename them, the page last.

    Returns:
        Name -> path of every file. Pictures of an earlier report that this one does not have are
        removed; other files in ``out`` stay.

    Raises:
        OutputError: the system did not write all of them.
    """
    files: Dict[str, bytes] = {}
    for picture in pictures:
        for kind in FILES:
            files[f"{picture.name}.{kind}"] = picture.file(kind)
    files[DOCUMENT] = encoded(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    files[TEXT] = encoded(as_text(dict(document)) + "\n")
    files[PAGE] = encoded(as_html(document, pictures))
    earlier = {f"{name}.{kind}" for name in OCCASIONAL for kind in FILES}
    replaced = earlier - {*files} if os.path.isfile(out / PAGE) else ()
    try:
        _write_all(out, files)
        for name in replaced:
            (out / name).unlink(missing_ok=True)
    except OSError as error:
        wanted = f"the report to be written to {out}"
        remedy = "Free some space, or choose another folder."
        raise OutputError(wanted, str(error), remedy) from error
    return {name: out / name for name in files}


def _write_all(out: Path, files: Dict[str, bytes]) -> None:
    is_new = not os.path.isdir(out)
    out.mkdir(exist_ok=True)
    try:
        with contextlib.ExitStack() as written:  # which ends with the file that came first
            for name in reversed(files):
                written.enter_context(replacing(out / name)).write_bytes(files[name])
    finally:
        if is_new and not any(out.iterdir()):
            out.rmdir()
