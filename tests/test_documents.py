"""The documents: their links resolve, their Python runs without fairseq, their commands agree."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.conftest import PACKAGE
from tests.new_process import without

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "docs").exists():
    pytest.skip("the documents are not beside these tests", allow_module_level=True)
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "studies").rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(path):
    return str(path.relative_to(ROOT))


def prose(path):
    """The text of a document without its fenced blocks."""
    return FENCED.sub("", path.read_text("utf-8"))


def anchors(path):
    """What GitHub and the site make of the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


def broken_links(path):
    """The relative links of a document that lead nowhere."""
    broken = []
    for target in re.findall(r"(?<=\]\()[^()\s]+(?=\))|(?<=<img src=\")[^\"]+", prose(path)):
        link = urlsplit(target)
        if link.scheme in ("http", "https"):
            continue
        to = (path.parent / link.path).resolve() if link.path else path
        if not to.exists() or (link.fragment and link.fragment not in anchors(to)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_every_link_resolves(path):
    assert broken_links(path) == []


def test_broken_links_are_found(tmp_path):
    (tmp_path / "b.md").write_text("# One: two\n", "utf-8")
    path = tmp_path / "a.md"
    links = "[](b.md#one-two) [](b.md#one) [](c.md) ![](d.png) [](https://e.org)"
    path.write_text(f'{links} <img src="e.png" width="9">', "utf-8")
    assert broken_links(path) == ["b.md#one", "c.md", "d.png", "e.png"]


NOT_RUN = re.compile(r"^<!-- not run: [^\n]+ -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# page -> its blocks of Python
PYTHON = {
    path: [
        text for language, text in FENCED.findall(path.read_text("utf-8")) if language == "python"
    ]
    for path in DOCUMENTS
    # tests/plugin/test_adding_a_penalty.py and tests/formats/test_adding_a_format.py follow these.
    if path.name not in ("adding_a_penalty.md", "adding_a_format.md")
}
PYTHON = {path: blocks for path, blocks in PYTHON.items() if blocks}
# A fork of a process that has imported torch starts without the import's second, and ends without
# the half second in which Python takes every module apart.
EACH_IN_A_FORK = """
import json, os
import torch

for page, text in json.loads(sys.argv[1]):
    if not os.fork():
        exec(text, {"__name__": "__main__"})
        os._exit(0)
    _, status = os.wait()
    if status:
        sys.exit(f"{page}\\n{text}")
"""


@pytest.mark.slow
def test_python_runs_without_fairseq():
    run = []
    for path, texts in PYTHON.items():
        not_run = NOT_RUN.findall(path.read_text("utf-8"))
        for text in not_run:
            compile(text, str(path), "exec")
        run += [(name(path), text) for text in texts if text not in not_run]
    done = subprocess.run(
        [sys.executable, "-c", without("fairseq", "fairseq_cli") + EACH_IN_A_FORK, json.dumps(run)],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_readme_and_the_library_page_have_python():
    assert {"README.md", "library.md"} <= {path.name for path in PYTHON}


def test_the_diff_of_the_readme_gives_the_command_of_the_page_on_training():
    """The latter is run, by tests/examples/test_readme_commands.py."""
    blocks = FENCED.findall((ROOT / "README.md").read_text("utf-8"))
    (diff,) = [text for language, text in blocks if language == "diff"]
    added = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
    removed = [line[1:] for line in diff.splitlines() if line.startswith("-")]
    assert len(removed) == 1
    assert "\n".join(added) in (ROOT / "docs" / "train.md").read_text("utf-8")


def test_the_paths_of_the_page_on_papers_exist():
    text = prose(ROOT / "docs" / "papers.md")
    paths = re.findall(r"`([\w./*]+(?:\.py|/))`", text)
    assert len(paths) > 50
    for path in paths:
        folders = (ROOT, PACKAGE, ROOT / "tests")
        found = [hit for folder in folders for hit in folder.glob(path.replace("../", ""))]
        assert found, path
