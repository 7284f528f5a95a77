"""Griffe extension: turns the docstrings' cross references and formulas into Markdown."""

from __future__ import annotations

import functools
import logging
import re
from typing import Any, Dict, Iterator, Optional

from griffe import AliasResolutionError, Extension, Module, Object

logger = logging.getLogger("mkdocs.plugins.docstrings")

ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?\.?([\w.]+)`")
LITERAL = re.compile(r"(:\w+:`[^`]*`|``.+?``|`[^`]+`|^ +\*{1,2}\w+: )")
SPECIAL = re.compile(r"([*<\[\]|~])")  # what Markdown would read as markup in a formula
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")


class MarkdownDocstrings(Extension):
    """Rewrites every docstring of a package once the whole package is loaded."""

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        """Griffe's hook: ``pkg`` is complete, so every reference can be resolved."""
        for obj in _walk(pkg):
            if obj.docstring is not None:
                obj.docstring.value = _markdown(obj.docstring.value, obj, pkg)


def _walk(obj: Object) -> Iterator[Object]:
    yield obj
    for member in obj.members.values():
        if not member.is_alias:
            yield from _walk(member)  # type: ignore[arg-type]


def _markdown(text: str, obj: Object, package: Module) -> str:
    """A docstring whose formulas are literal and whose references are links.

    A paragraph indented by four blanks or more is code, unless it continues a section (``Args:``).
    """
    lines, in_section, code = [], False, False
    blank = True
    for line in text.split("\n"):
        if SECTION.fullmatch(line):
            in_section = True
        elif line and not line.startswith(" "):
            in_section = False
        if line.strip():
            code = line.startswith("    ") and not in_section and (blank or code)
        blank = not line.strip()
        lines.append(line if code else _line(line, obj, package))
    return "\n".join(lines)


def _line(line: str, obj: Object, package: Module) -> str:
    pieces = []
    for piece in LITERAL.split(line):
        role = ROLE.fullmatch(piece)
        if role:
            pieces.append(_link(role.group(1), obj, package))
        elif LITERAL.fullmatch(piece):
            pieces.append(piece)
        else:
            pieces.append(SPECIAL.sub(r"\\\1", piece))
    return "".join(pieces)


def _link(name: str, obj: Object, package: Module) -> str:
    """A reference to the object called ``name`` from where ``obj`` is defined.

    What has no page, because it is private or has no docstring, is shown as code.
    """
    found = _find(name, obj, package)
    if found is None:
        logger.warning("%s: the docstring refers to %s, which is not found", obj.path, name)
        return f"`{name}`"
    hidden = any(part.startswith("_") for part in found.path.split("."))
    return f"`{name}`" if hidden or found.docstring is None else f"[`{name}`][{found.path}]"


def _find(name: str, obj: Object, package: Module) -> Optional[Object]:
    """The object that ``name`` means in ``obj``, in the scopes around it or in the package."""
    scope: Optional[Object] = obj
    while scope is not None:
        path = f"{scope.path}.{name}"[len(package.path) + 1 :]
        if path in _members(package):
            return _members(package)[path]
        scope = scope.parent  # type: ignore[assignment]
    return _members(package).get(name[len(package.path) + 1 :])


@functools.lru_cache(maxsize=1)
def _members(package: Module) -> Dict[str, Object]:
    """Every object of the package under each of its names, without the package's own."""
    found = {}
    for obj in _walk(package):
        found[obj.path[len(package.path) + 1 :]] = obj
        for name, member in obj.members.items():
            if member.is_alias and member.target_path.startswith(f"{package.path}."):  # type: ignore[union-attr]
                try:
                    found[f"{obj.path}.{name}"[len(package.path) + 1 :]] = member.final_target  # type: ignore[union-attr]
                except AliasResolutionError:
                    continue
    return found
