"""Data flows one way: no room imports from a room that is built on it (docs/architecture.md)."""

import ast
from pathlib import Path

import pytest

import spectral_fairseq

PACKAGE = Path(spectral_fairseq.__file__).parent

# room -> rooms it may import from, besides itself
MAY_IMPORT = {
    "errors": set(),
    "functional": {"errors"},
    "provenance": set(),
    "checkpoints": {"errors", "functional", "embeddings", "provenance"},
    "compat": {"errors", "checkpoints", "provenance"},
    "embeddings": {"errors", "functional"},
    "heads": {"errors", "functional", "embeddings"},
    "lm": {"errors", "functional", "embeddings", "heads"},
    "analysis": {"errors", "functional", "embeddings", "checkpoints", "provenance"},
    "plugin": {"errors", "functional", "embeddings", "heads", "lm", "checkpoints", "compat"},
    "tools": {
        "errors",
        "functional",
        "lm",
        "checkpoints",
        "provenance",
        "analysis",
        "plugin",
    },  # fmt: skip
    "cli": {
        "errors",
        "functional",
        "checkpoints",
        "provenance",
        "analysis",
        "tools",
        "plugin",
        "compat",
    },  # fmt: skip
    "__init__": {"plugin"},
}
FAIRSEQ_ROOMS = {"plugin", "compat", "tools"}
VERSION_ROOMS = {"compat", "provenance", "checkpoints"}


def imports(path):
    """Every dotted module name that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(path):
    first = path.relative_to(PACKAGE).parts[0]
    return first[:-3] if first.endswith(".py") else first


FILES = sorted(PACKAGE.rglob("*.py"))


def test_the_rooms_are_all_known():
    assert {room_of(path) for path in FILES} <= set(MAY_IMPORT)
    assert len(FILES) > 10


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_arrow_points_back(path):
    room = room_of(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "spectral_fairseq" and len(parts) > 1 and parts[1] in MAY_IMPORT:
            assert parts[1] == room or parts[1] in MAY_IMPORT[room], f"{room} imports {name}"
        if parts[0] in ("fairseq", "fairseq_cli"):
            assert room in FAIRSEQ_ROOMS, f"{room} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_compat_asks_for_versions(path):
    if room_of(path) in VERSION_ROOMS:
        return
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr == "__version__":
            owner = ast.unparse(node.value)
            assert owner == "spectral_fairseq", f"{path}:{node.lineno} asks {owner} for its version"
