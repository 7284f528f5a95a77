"""mkdocs hook: pages whose text is outside docs/, and one page of reference for each module.

A page keeps its path in the repository, so that relative links work on the site as they do in
a checkout. Links to other files of the repository are answered by copies of those files; links to
modules of the package lead to their reference.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Dict, List
from urllib.parse import urlsplit

from mkdocs.structure.files import File, Files

from spectral_fairseq.analysis.plots import draw_all
from spectral_fairseq.analysis.report import as_html

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "spectral_fairseq"
REPORT = "quickstart_report"
LINK = re.compile(r"(?<=\]\()[^()\s]+(?=\))|(?<=<img src=\")[^\"]+(?=\")")


def sources() -> Dict[str, Path]:
    """Address on the site -> Markdown file of the repository, for every page that is written."""
    outside = [
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
        ROOT / "benchmarks" / "README.md",
        ROOT / "studies" / "fuzz" / "README.md",
        *sorted((ROOT / "examples").rglob("*.md")),
        *sorted((ROOT / "studies").rglob("*.md")),
    ]
    found = {path.relative_to(ROOT).as_posix(): path for path in outside}
    found["index.md"] = found.pop("README.md")
    for path in sorted((ROOT / "docs").glob("*.md")):
        found[path.name] = path
    return found


def modules() -> Dict[str, str]:
    """Path of each module of the package -> address of its reference."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        page = path.relative_to(ROOT / PACKAGE).with_suffix(".md").as_posix()
        found[path.relative_to(ROOT).as_posix()] = f"reference/{page}".replace("__init__", "index")
    return found


def targets() -> Dict[str, str]:
    """Path in the repository -> address on the site, for pages and modules."""
    found = {path.relative_to(ROOT).as_posix(): uri for uri, path in sources().items()}
    return {**found, **modules()}


def on_config(config: Any) -> Any:
    """Append the API reference to the navigation."""
    tree: Dict[str, Any] = {}
    for module, uri in modules().items():
        *packages, name = Path(module).relative_to(PACKAGE).with_suffix("").parts
        level = tree
        for package in packages:
            level = level.setdefault(package, {})
        level[name] = uri
    config.nav.append({"API reference": _nav(tree)})
    return config


def _nav(tree: Dict[str, Any]) -> List[Any]:
    index = [tree["__init__"]] if "__init__" in tree else []
    packages = sorted(tree.items(), key=lambda item: (isinstance(item[1], str), item[0]))
    return index + [
        {name: uri if isinstance(uri, str) else _nav(uri)}
        for name, uri in packages
        if name != "__init__"
    ]


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and the files that pages link to."""
    for uri, path in sources().items():
        text = translated(path, uri)
        if uri in files.src_uris:
            files.remove(files.src_uris[uri])
        files.append(File.generated(config, uri, content=text))
        for linked in _linked_files(path):
            address = linked.relative_to(ROOT).as_posix()
            if address.startswith("docs/"):
                continue
            if address not in files.src_uris:
                files.append(File.generated(config, address, content=linked.read_bytes()))
    for module, uri in modules().items():
        name = Path(module).with_suffix("").as_posix().replace("/", ".")
        name = name[: -len(".__init__")] if name.endswith(".__init__") else name
        files.append(File.generated(config, uri, content=f"::: {name}\n"))
    files.append(File.generated(config, f"{REPORT}.html", content=report_page()))
    return files


def report_page() -> str:
    """The report of the quickstart, drawn from its figures as ``compare --out`` draws it."""
    document = json.loads((ROOT / "docs" / f"{REPORT}.json").read_text("utf-8"))
    return as_html(document, draw_all(document))


def translated(path: Path, uri: str) -> str:
    """The text of a Markdown file, its links rewritten for the page at ``uri``."""
    known = targets()

    def rewrite(match: re.Match[str]) -> str:
        link = urlsplit(match.group())
        if link.scheme or link.netloc or not link.path:
            return match.group()
        target = os.path.normpath(path.parent / link.path)
        inside = os.path.relpath(target, ROOT).replace(os.sep, "/")
        for candidate in (inside, f"{inside}/README.md", f"{inside}/__init__.py"):
            if candidate in known:
                inside = known[candidate]
                break
        else:
            inside = inside[len("docs/") :] if inside.startswith("docs/") else inside
        address = os.path.relpath(inside, os.path.dirname(uri) or ".").replace(os.sep, "/")
        return address + (f"#{link.fragment}" if link.fragment else "")

    return LINK.sub(rewrite, path.read_text("utf-8"))


def _linked_files(path: Path) -> List[Path]:
    """The files of the repository that a Markdown file links to and that are not pages."""
    known = targets()
    found = []
    for link in LINK.findall(path.read_text("utf-8")):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc or not parts.path:
            continue
        target = Path(os.path.normpath(path.parent / parts.path))
        if target.is_file() and target.relative_to(ROOT).as_posix() not in known:
            found.append(target)
    return found
