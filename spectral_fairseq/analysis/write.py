"""A folder of results that is never half-written: pictures, JSON and, last, the page."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Dict, Mapping, Sequence, Union

from spectral_fairseq.analysis.plots import Picture
from spectral_fairseq.analysis.render import as_latex, as_text
from spectral_fairseq.analysis.report import as_html
from spectral_fairseq.errors import ConfigurationError

PAGE = "report.html"


def check_folder(out: Union[str, Path], overwrite: bool) -> Path:
    """Refuse an unusable output folder before any work is done.

    Args:
        out: the folder.
        overwrite: whether results may be there already.

    Returns:
        ``out`` as a path.

    Raises:
        ConfigurationError: a file, in no folder, not writable, or with content and no overwrite.
    """
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"a folder for {out}", "a file", "Choose another name for --out.")
    if not folder.absolute().parent.is_dir():
        raise ConfigurationError(
            f"the folder {folder.absolute().parent} to exist", "no such folder", "Create it first."
        )
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise ConfigurationError(
            f"an empty or new folder for --out {out}", "one with files in it",
            "Add --overwrite to replace the report there, or choose another folder.",
        )  # fmt: skip
    return folder


def write_results(
    out: Path, document: Mapping[str, Any], pictures: Sequence[Picture]
) -> Dict[str, Path]:
    """Write all files next to ``out`` first, then move them in, the page last.

    Args:
        out: of :func:`check_folder`.
        document: of :func:`analysis.results.document`.
        pictures: of :func:`analysis.plots.draw_all`.

    Returns:
        Name -> path of every file. Other files in ``out`` stay.
    """
    files: Dict[str, bytes] = {}
    for picture in pictures:
        for kind in ("png", "svg"):
            files[f"{picture.name}.{kind}"] = picture.files[f"light.{kind}"]
    files["analysis.json"] = (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()
    files["measures.txt"] = (as_text(dict(document)) + "\n").encode()
    files["measures.tex"] = (as_latex(dict(document)) + "\n").encode()
    files[PAGE] = as_html(document, pictures).encode()
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
    try:
        for name, content in files.items():
            (partial / name).write_bytes(content)
        out.mkdir(exist_ok=True)
        for name in files:
            os.replace(partial / name, out / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {name: out / name for name in files}
