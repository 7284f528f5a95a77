"""The wording of every error and warning of the package, as its source has it, in one text.

``python -m tests.messages`` writes it to messages.txt. What a message computes stands in braces.
"""

import ast
import copy
import re
from pathlib import Path
from typing import Iterator, List

import spectral_fairseq
from spectral_fairseq import errors, files

MESSAGES = Path(__file__).with_suffix(".txt")
PACKAGE = Path(spectral_fairseq.__file__).parent
WARNINGS = ("warn", "warning")
RAISED = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.SpectralFairseqError)
}
# The common checks, whose messages follow from what they are given.
CHECKS = {name for name in {**vars(errors), **vars(files)} if name.startswith("check_")} | {
    "clashing_flags",
    "idle_flag",
    "misspelt",
    "missing_package",
}


def all_messages() -> str:
    """File by file, in the order of the source: the class of the error and its text."""
    return "\n".join(
        f"{path.relative_to(PACKAGE).as_posix()}\n{text}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if (text := "".join(_messages(ast.parse(path.read_text("utf-8")))))
    )


def _messages(tree: ast.Module) -> Iterator[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda one: (one.lineno, one.col_offset)):
        call = _Spelled(tree, call).visit(call)
        function = call.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if name in RAISED and len(given) in (2, 3):
            expected, found, remedy = [*map(_text, given), *_usual_remedy(name)][:3]
            yield f"  {name}: expected {expected}; found {found}. {remedy}\n"
        elif name in CHECKS:
            named = [f"{keyword.arg}={_text(keyword.value)}" for keyword in call.keywords]
            yield f"  {name}: {'; '.join([*map(_text, call.args), *named])}\n"
        elif name in WARNINGS and given:
            yield f"  warning: {_text(given[0])}\n"


_TEXTS = (ast.Constant, ast.JoinedStr)


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


class _Spelled(ast.NodeTransformer):
    """Puts texts in the place of the names that stand for them in a call.

    These are constants, and what the function of the call has assigned to a name above it.
    """

    def __init__(self, tree: ast.Module, call: ast.Call) -> None:
        around = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.lineno <= call.lineno <= node.end_lineno
        ]
        self.texts = {
            name: ast.Constant(text) for name, text in vars(errors).items() if isinstance(text, str)
        }
        inside = ast.walk(around[-1]) if around else ()
        above = sorted((one for one in inside if isinstance(one, ast.Assign)), key=_line)
        for node in [*tree.body, *above]:
            if isinstance(node, ast.Assign) and (node in tree.body or _line(node) < _line(call)):
                self._take(node.targets[0], self.visit(copy.deepcopy(node.value)))

    def _take(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts):
                self._take(one, other)
        elif isinstance(target, ast.Name):
            self.texts.pop(target.id, None)
            if isinstance(value, ast.JoinedStr) or (
                isinstance(value, ast.Constant) and isinstance(value.value, str)
            ):
                self.texts[target.id] = value

    def visit_Name(self, node: ast.Name) -> ast.expr:  # noqa: N802
        """The text that the name stands for, or the name."""
        return self.texts.get(node.id, node)


def _usual_remedy(name: str) -> List[str]:
    """What an error of a class says where its third argument is not given; for most it must be."""
    remedy = getattr(getattr(errors, name), "usual_remedy", None)
    return [] if remedy is None else [remedy]


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("\n", "\\n")
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, _TEXTS):
        return _text(node.value)
    code = ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node)
    # Versions of Python differ in the quotes and in the parentheses of "for (a, b) in".
    code = re.sub(r"for \((.+?)\) in", r"for \1 in", code).replace('"', "'")
    return f"{{{code}}}"


if __name__ == "__main__":
    MESSAGES.write_text(all_messages(), "utf-8")
