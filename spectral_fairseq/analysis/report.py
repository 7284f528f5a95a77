"""One HTML page that holds all: tables, pictures, signatures and the raw JSON; no network.

# Note [A page without a network]
Pictures and the JSON are data: URLs and the style is in the page, so that it can be mailed or
archived as one file. A content security policy forbids everything else, which makes a forgotten
reference fail in any browser instead of only where there is no network.
"""

from __future__ import annotations

import base64
import json
from html import escape
from typing import Any, Dict, List, Mapping, Sequence

from spectral_fairseq.analysis.catalogue import groups_in_use, shown
from spectral_fairseq.analysis.plots import Picture

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --quiet: #4a4f55; --ground: #ffffff;
  --band: #f1f3f5; --line: #c6cbd1; --link: #0b57a4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --quiet: #b4bac2; --ground: #16191d; --band: #20252b; --line: #3f4650;
    --link: #8ec5ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 72rem; background: var(--ground);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
a { color: var(--link); }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; }
h2 { font-size: 1.25rem; margin: 2rem 0 .6rem; }
p, figcaption, dd { max-width: 48rem; }
.quiet { color: var(--quiet); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
thead th { position: sticky; top: 0; background: var(--ground); vertical-align: bottom; }
tbody th[scope=rowgroup] { background: var(--band); text-align: left; }
tbody th[scope=row] { font-weight: normal; }
tbody th small { display: block; color: var(--quiet); max-width: 34rem; }
figure { margin: 1rem 0 2rem; }
figure img { max-width: 100%; height: auto; border: 1px solid var(--line); }
code { font-size: .85em; overflow-wrap: anywhere; }
dt { font-weight: 600; margin-top: .8rem; }
dd { margin: 0 0 0 1rem; }
.button { display: inline-block; padding: .45rem .9rem; border: 1px solid var(--link);
  border-radius: .3rem; text-decoration: none; }
.button:focus-visible, a:focus-visible, summary:focus-visible, .scroll:focus-visible {
  outline: 3px solid var(--link); outline-offset: 2px; }
@media print { .button { display: none; } body { max-width: none; } }
"""

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


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
    raw = base64.b64encode(json.dumps(document, ensure_ascii=False).encode()).decode()
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Embedding space of {escape(title)}</title>",
        f"<style>{_STYLE}</style></head><body><main>",
        f"<h1>Embedding space of {escape(title)}</h1>",
        f'<p class="quiet">spectral-fairseq {escape(document["command"])}, seed '
        f"{document['options']['seed']}. Each number's options, versions and hashes are under "
        '<a href="#signatures">Signatures</a>.</p>',
        '<p><a class="button" id="download" download="analysis.json" '
        f'href="data:application/json;base64,{raw}">Download the raw JSON</a></p>',
        _measures(checkpoints),
        *map(_figure, pictures),
        _neighbours(checkpoints),
        _signatures(document),
        "</main></body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _measures(checkpoints: Sequence[Mapping[str, Any]]) -> str:
    heads = "".join(f'<th scope="col">{escape(one["label"])}</th>' for one in checkpoints)
    lines = [
        '<h2 id="measures">Measures</h2>',
        '<div class="scroll" tabindex="0" role="region" aria-labelledby="measures"><table>',
        f'<thead><tr><th scope="col">measure</th>{heads}</tr></thead>',
    ]
    for group, measures in groups_in_use([one["measures"] for one in checkpoints]).items():
        lines.append(
            f'<tbody><tr><th scope="rowgroup" colspan="{len(checkpoints) + 1}">{escape(group)}'
            "</th></tr>"
        )
        for m in measures:
            cells = "".join(
                f"<td>{escape(shown(one['measures'].get(m.key), m.digits))}</td>"
                for one in checkpoints
            )
            lines.append(
                f'<tr><th scope="row">{escape(m.title)}<small>{escape(m.meaning)}</small></th>'
                f"{cells}</tr>"
            )
        lines.append("</tbody>")
    return "\n".join([*lines, "</table></div>"])


def _figure(picture: Picture) -> str:
    urls = {
        theme: "data:image/svg+xml;base64,"
        + base64.b64encode(picture.files[f"{theme}.svg"]).decode()
        for theme in ("light", "dark")
    }
    return (
        f'<h2 id="{picture.name}">{escape(picture.title)}</h2><figure><picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="{urls["dark"]}">'
        f'<img src="{urls["light"]}" alt="{escape(picture.alt)}"></picture>'
        f"<figcaption>{escape(picture.alt)}</figcaption></figure>"
    )


def _neighbours(checkpoints: Sequence[Mapping[str, Any]]) -> str:
    words = list(checkpoints[0]["neighbours"])
    if not words:
        return ""
    lines = ['<h2 id="neighbours">Nearest neighbours by cosine</h2><dl>']
    for word in words:
        lines.append(f"<dt>{escape(word)}</dt>")
        for one in checkpoints:
            near = ", ".join(
                f"{escape(n['word'])}&nbsp;{shown(n['cosine'], 3)}" for n in one["neighbours"][word]
            )
            lines.append(f'<dd><span class="quiet">{escape(one["label"])}:</span> {near}</dd>')
    return "\n".join([*lines, "</dl>"])


def _signatures(document: Mapping[str, Any]) -> str:
    lines = ['<h2 id="signatures">Signatures</h2><dl>']
    for one in document["checkpoints"]:
        table = one["table"]
        shared = f", shared with {', '.join(table['names'][1:])}" if table["names"][1:] else ""
        facts = [
            f"<code>{escape(one['signature'])}</code>",
            f"File <code>{escape(one['path'])}</code>, SHA-256 <code>{one['sha256']}</code>.",
            f"Table {escape(table['name'] + shared)}: {table['kind']}, {table['dtype']}, "
            f"{table['words']:,} of {table['rows']:,} rows, {table['dimensions']} dimensions.",
            f"Architecture {escape(str(one['arch'] or 'unknown'))}; updates "
            f"{one['progress']['updates'] if one['progress']['updates'] is not None else '–'}.",
            f"Dictionary: {escape(one['dictionary']['path'] or 'none')} "
            f"({escape(one['dictionary']['remark'])}).",
            *_data_facts(one),
        ]
        lines.append(f"<dt>{escape(one['label'])}</dt>")
        lines += [f"<dd>{fact}</dd>" for fact in facts]
    lines.append("</dl><details><summary>Options and versions</summary><dl>")
    for name, values in (("Options", document["options"]), ("Versions", document["versions"])):
        listed = ", ".join(f"{key} {_plain(value)}" for key, value in values.items())
        lines.append(f"<dt>{name}</dt><dd>{escape(listed)}</dd>")
    lines.append(f"<dt>Threads</dt><dd>{document['threads']}</dd></dl></details>")
    return "\n".join(lines)


def _data_facts(one: Mapping[str, Any]) -> List[str]:
    facts = []
    outputs: Dict[str, Any] = one["outputs"] or {}
    if outputs:
        facts.append(
            f"Predictions: the first {outputs['tokens']:,} tokens of {escape(outputs['subset'])} "
            f"in <code>{escape(outputs['data'])}</code>, {outputs['words']:,} words; a "
            f"singular value counts above {shown(outputs['threshold'])} of the largest."
        )
    nbest: Dict[str, Any] = one["nbest"] or {}
    if nbest:
        facts.append(
            f"N best: {nbest['sentences']:,} sentences of <code>{escape(nbest['file'])}</code>, "
            f"{nbest['hypotheses']['least']} to {nbest['hypotheses']['most']} hypotheses, up to "
            f"{nbest['references']} references; <code>{escape(nbest['signature'])}</code>."
        )
    return facts


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "not installed" if value is None else str(value)
