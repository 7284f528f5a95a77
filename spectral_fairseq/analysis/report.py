"""The HTML report: one page that opens with a verdict and holds everything else folded.

Note [A page without a network]
-------------------------------
Pictures and the JSON are data: URLs and the style is in the page, so that it can be sent or
archived as one file. A content security policy forbids everything else, so a forgotten reference
fails in every browser, not only where there is no network. The template is report.html.jinja2.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any, Dict, Iterable, Mapping, Sequence, Union

from spectral_fairseq.analysis.catalogue import ALL, groups_in_use, shown
from spectral_fairseq.analysis.options import spread
from spectral_fairseq.analysis.plots import FILES, MOST_CURVES, OCCASIONAL, OPENING, Picture
from spectral_fairseq.analysis.render import as_text, spread_of
from spectral_fairseq.analysis.verdict import MOST_VERDICTS, headline, verdict, warnings
from spectral_fairseq.errors import ConfigurationError, OutputError, needs_extra
from spectral_fairseq.files import check_free, check_parent, replacing


def as_html(document: Mapping[str, Any], pictures: Sequence[Picture]) -> str:
    """The page."""
    with needs_extra("plots", "for pictures and the report"):
        from jinja2 import Environment, PackageLoader, StrictUndefined

    checkpoints = document["checkpoints"]
    title = ", ".join(one["label"] for one in checkpoints[:3])
    if len(checkpoints) > 3:
        title += f" and {len(checkpoints) - 3} more"
    environment = Environment(
        loader=PackageLoader("spectral_fairseq", "analysis"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["with_flags"] = _with_flags
    return environment.get_template("report.html.jinja2").render(
        document=document,
        checkpoints=checkpoints,
        title=title,
        headline=[measure for measure in ALL if measure.headline],
        groups=groups_in_use([one["measures"] for one in checkpoints]),
        pictures=pictures,
        opening=OPENING,
        raw=base64.b64encode(json.dumps(document, ensure_ascii=False).encode()).decode(),
        shown=shown,
        spread_of=spread_of,
        headline_of=headline,
        verdict=verdict,
        warnings=warnings(checkpoints),
        drawn=spread(checkpoints, MOST_CURVES),
        opened=spread(checkpoints, MOST_VERDICTS),
    )


def _with_flags(text: str) -> Any:
    """``text`` as HTML, with flags of the command line as code that is not broken into lines."""
    from markupsafe import Markup, escape

    flag = r"--[a-z-]+(?: \w+_\w+)?"  # with the name of a criterion behind it
    return Markup(re.sub(flag, r'<code class="flag">\g<0></code>', str(escape(text))))


# Writes a folder of results whole or not at all: pictures, JSON and, last, the page.


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
    files[DOCUMENT] = (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()
    files[TEXT] = (as_text(dict(document)) + "\n").encode()
    files[PAGE] = as_html(document, pictures).encode()
    earlier = {f"{name}.{kind}" for name in OCCASIONAL for kind in FILES}
    replaced = earlier - {*files} if os.path.isfile(out / PAGE) else ()
    try:
        _write_all(out, files)
        for name in replaced:
            (out / name).unlink(missing_ok=True)
    except OSError as error:
        wanted, remedy = f"the report to be written to {out}", "Free some space."
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
