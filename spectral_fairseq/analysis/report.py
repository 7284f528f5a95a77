"""The results as text, and as an HTML page that opens with a verdict and holds the rest folded.

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
from typing import Any, Dict, Iterable, List, Mapping, Sequence, Union

from spectral_fairseq.analysis.catalogue import ALL, Measure, groups_in_use, shown
from spectral_fairseq.analysis.drawing import FILES, Picture
from spectral_fairseq.analysis.plots import MOST_CURVES, OCCASIONAL, OPENING, spread
from spectral_fairseq.analysis.verdict import (
    MOST_VERDICTS,
    headline_with_figures,
    verdict,
    warnings,
)
from spectral_fairseq.errors import (
    ConfigurationError,
    OutputError,
    needs_extra,
    printable,
    wrapped,
)
from spectral_fairseq.files import check_free, check_parent, replacing

# Tables of measures as text, one column a checkpoint.

# What a terminal shows of a table, beside the values of a random one.
FOUR = ("mean_cosine", "mean_share", "sigma_over_edge_centred", "effective_rank_centred")


def as_summary(document: Dict[str, Any]) -> str:
    """What was measured, the verdict, and four figures: at most 25 lines for one model."""
    parts = _parts(document, {"": [m for m in ALL if m.key in FOUR]})
    parts[-1] += "\nAll measures: --all. The full report: --out DIR. For programs: --format json."
    return printable("\n\n".join(parts))


def as_text(document: Dict[str, Any]) -> str:
    """All measures of the document as aligned plain text."""
    signed = (f"{entry['label']}: {entry['signature']}" for entry in document["checkpoints"])
    return printable("\n\n".join([*_parts(document, _groups(document)), "\n".join(signed)]))


def _parts(document: Dict[str, Any], groups: Dict[str, List[Measure]]) -> List[str]:
    """What was measured, the verdict, the table of measures and neighbours."""
    checkpoints = document["checkpoints"]
    return [*_openings(checkpoints), _measures(document, groups), *_neighbours(checkpoints)]


def _neighbours(checkpoints: List[Dict[str, Any]]) -> List[str]:
    return [
        f"Neighbours of {word} in {checkpoint['label']}: "
        + ", ".join(f"{n['word']} {shown(n['cosine'], 3)}" for n in neighbours)
        for checkpoint in checkpoints
        for word, neighbours in checkpoint["neighbours"].items()
    ]


def _measures(document: Dict[str, Any], groups: Dict[str, List[Measure]]) -> str:
    """Measures in groups, one column a checkpoint, and one for what random tables have."""
    checkpoints = document["checkpoints"]
    headers = ["", *(checkpoint["label"] for checkpoint in checkpoints), "random table"]
    rows: List[Any] = []
    for group, measures in groups.items():
        rows += [None] if rows else []
        rows += [[group, *("" for _ in headers[1:])]] if group else []
        rows += [[m.title, *_values(checkpoints, m), _random(checkpoints, m)] for m in measures]
    return _aligned(rows, headers)


def _random(checkpoints: List[Dict[str, Any]], measure: Measure) -> str:
    """What random tables like these have: one value, or those of tables that differ in shape."""
    key = measure.key
    values = [measure.shown(one["random"][key]) for one in checkpoints if key in one["random"]]
    return " / ".join(dict.fromkeys(values))


def _aligned(rows: List[Any], headers: List[str]) -> str:
    """Columns of text, with a line where a row is None."""
    from tabulate import SEPARATING_LINE, tabulate  # only text needs it, a callback does not

    rows = [SEPARATING_LINE if row is None else row for row in rows]
    align = ("left", *("right" for _ in headers[1:]))
    return tabulate(rows, headers, disable_numparse=True, colalign=align)


def _openings(checkpoints: List[Dict[str, Any]]) -> List[str]:
    """The warnings, and what each model is; the same advice for several is printed once."""
    parts = [wrapped(f"Warning: {text}") for text in warnings(checkpoints)]
    advised: Dict[str, str] = {}  # advice -> label of the first model that it is for
    for checkpoint in spread(checkpoints, MOST_VERDICTS):
        *findings, advice = verdict(checkpoint)
        first = advised.setdefault(advice, checkpoint["label"])
        if first != checkpoint["label"]:
            advice = f"What to try is the same as for {first}."
        parts.append(_opening(checkpoint, " ".join([*findings, advice])))
    return parts


def _opening(checkpoint: Dict[str, Any], words: str) -> str:
    """The name, architecture, progress and table of one checkpoint, and ``words`` on it."""
    updates = checkpoint["progress"]["updates"]
    nameless = "word vectors without a model"
    if checkpoint["origin"] != "vectors":
        nameless = "a model of unknown architecture"
    name = f"{checkpoint['label']}: {checkpoint['arch'] or nameless}"
    return "\n".join(
        [
            name if updates is None else f"{name}, {updates:,} updates",
            wrapped(checkpoint["table"]["choice"], "  "),
            wrapped(words, "  "),
        ]
    )


def _groups(document: Dict[str, Any]) -> Dict[str, List[Measure]]:
    return groups_in_use([checkpoint["measures"] for checkpoint in document["checkpoints"]])


def _values(checkpoints: List[Dict[str, Any]], measure: Measure) -> List[str]:
    return [measure.shown(checkpoint["measures"].get(measure.key)) for checkpoint in checkpoints]


def as_html(document: Mapping[str, Any], pictures: Sequence[Picture]) -> str:
    """The page."""
    with needs_extra("plots", "for pictures and the report"):
        from jinja2 import Environment, PackageLoader, StrictUndefined

    checkpoints = document["checkpoints"]
    title = ", ".join(checkpoint["label"] for checkpoint in checkpoints[:3])
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
        groups=groups_in_use([checkpoint["measures"] for checkpoint in checkpoints]),
        pictures=pictures,
        opening=OPENING,
        raw=base64.b64encode(json.dumps(document, ensure_ascii=False).encode()).decode(),
        shown=shown,
        headline_of=headline_with_figures,
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
