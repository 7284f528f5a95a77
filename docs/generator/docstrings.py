"""Griffe extension: turns the docstrings' cross references and formulas into Markdown."""

from __future__ import annotations

import functools
import logging
import re
from typing import Any, Dict, Iterator, Optional

from griffe import Extension, Module, Object

logger = logging.getLogger("mkdocs.plugins.docstrings")

ROLE = re.compile(r":(attr|class|data|exc|func|meth|mod):`~?\.?([\w.]+)`")
LITERAL = re.compile(r"(:\w+:`[^`]*`|``.+?``|`[^`]+`|^ +\*{1,2}\w+: )")
SPECIAL = re.compile(r"([*<\[\]|~])")  # what Markdown would read as markup in a formula
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")


class MarkdownDocstrings(Extension):
    """Rewrites every docstring of a package once the whole package is loaded."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Griffe's hook: ``pkg`` is complete, so every reference can be resolved."""
        for obj in _walk(pkg):
            if obj.docstring is not None:
                text = obj.docstring.value
                if obj.is_class and any(str(base).endswith("NamedTuple") for base in obj.bases):  # type: ignore[attr-defined]
                    text = text.replace("\nArgs:\n", "\nAttributes:\n")  # it has no constructor
                obj.docstring.value = _markdown(text, obj, pkg)


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
            pieces.append(_link(*role.groups(), obj, package))
        elif LITERAL.fullmatch(piece):
            pieces.append(piece)
        else:
            pieces.append(SPECIAL.sub(r"\\\1", piece))
    return "".join(pieces)


def _link(kind: str, name: str, obj: Object, package: Module) -> str:
    """A reference to the object called ``name`` from where ``obj`` is defined.

    What has no page is shown as code: private objects, those without a docstring, and those of
    torch, to which inherited methods belong.
    """
    found = _find(name, obj, package)
    if found is None:
        if kind != "meth" and not name.startswith("torch."):
            logger.warning("%s: the docstring refers to %s, which is not found", obj.path, name)
        return f"`{name}`"
    hidden = any(part.startswith("_") for part in found.path.split("."))
    return f"`{name}`" if hidden or found.docstring is None else f"[`{name}`][{found.path}]"


def _find(name: str, obj: Object, package: Module) -> Optional[Object]:
    """What ``name`` means in ``obj`` or in a scope around it, else the one object called so."""
    objects = _objects(package)
    scope: Optional[Object] = obj
    while scope is not None:
        member = scope.members.get(name)
        path = member.target_path if member is not None and member.is_alias else None  # type: ignore
        path = path or f"{scope.path}.{name}"
        if path in objects:
            return objects[path]
        scope = scope.parent  # type: ignore[assignment]
    found = [objects[path] for path in objects if f".{path}".endswith(f".{name}")]
    return found[0] if len(found) == 1 else None


@functools.lru_cache(maxsize=1)
def _objects(package: Module) -> Dict[str, Object]:
    return {obj.path: obj for obj in _walk(package)}
