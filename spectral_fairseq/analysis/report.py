"""The results as an HTML page that opens with a verdict and holds the rest folded.

Note [A page without a network]
-------------------------------
Pictures and the JSON are data: URLs and the style is in the page, so that it can be sent or
archived as one file. A content security policy forbids everything else, so a forgotten reference
fails in every browser, not only where there is no network. The template is report.html.jinja2.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Any, Mapping, Sequence

from spectral_fairseq.analysis.catalogue import ALL, groups_in_use, shown
from spectral_fairseq.analysis.drawing import Picture
from spectral_fairseq.analysis.plots import MOST_CURVES, OPENING
from spectral_fairseq.analysis.selection import MOST_VERDICTS, spread
from spectral_fairseq.analysis.wording import headline_with_figures, verdict, warnings
from spectral_fairseq.errors import needs_extra


def encoded(text: str) -> bytes:
    """Text in UTF-8; bytes of a file's name that are no text stay as escapes, as in JSON."""
    return text.encode("utf-8", "backslashreplace")


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
        raw=base64.b64encode(encoded(json.dumps(document, ensure_ascii=False))).decode(),
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
