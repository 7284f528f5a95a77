"""The HTML report: one page that opens with a verdict and holds everything else folded.

# Note [A page without a network]
Pictures and the JSON are data: URLs and the style is in the page, so that it can be sent or
archived as one file. A content security policy forbids everything else, so a forgotten reference
fails in every browser, not only where there is no network. The template is report.html.jinja2.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Any, Mapping, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from spectral_fairseq.analysis.catalogue import ALL, groups_in_use, shown
from spectral_fairseq.analysis.plots import OPENING, Picture
from spectral_fairseq.analysis.render import spread_of
from spectral_fairseq.analysis.selection import spread
from spectral_fairseq.analysis.verdict import MOST_VERDICTS, verdict, warnings


def as_html(document: Mapping[str, Any], pictures: Sequence[Picture]) -> str:
    """The page.

    Args:
        document: of :func:`analysis.results.document`.
        pictures: of :func:`analysis.plots.draw_all`.
    """
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
        verdict=verdict,
        warnings=warnings(checkpoints),
        opened=spread(checkpoints, MOST_VERDICTS),
    )


def _with_flags(text: str) -> Markup:
    """``text`` as HTML, with flags of the command line as code that is not broken into lines."""
    return Markup(re.sub(r"--[a-z-]+", r'<code class="flag">\g<0></code>', str(escape(text))))
