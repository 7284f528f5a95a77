"""Values of settings that are written as Python expressions, without running code.

fairseq passes such strings to ``eval``: ``"(0.9, 0.98)"``, ``"[(512, 3)] * 20"``. A checkpoint
brings its own settings, so that ``eval`` would run whatever its author liked.
"""

from __future__ import annotations

import ast
import operator
from typing import Any, Callable, Dict, Type

from spectral_fairseq.errors import ConfigurationError

MAX_CHARACTERS = 1_000_000
MAX_ITEMS = 1_000_000  # of all repeated and joined lists, tuples and strings
_OPERATORS: Dict[Type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SEQUENCES = (list, tuple, str, bytes)


def literal(text: str) -> Any:
    """The value of an expression of literals: numbers, strings, lists, tuples, sets, dictionaries.

    Numbers may be added, subtracted, multiplied and divided, lists, tuples and strings joined
    and repeated. Nothing is called, looked up or indexed.

    Returns:
        What ``eval(text)`` returns for such an expression.

    Raises:
        ConfigurationError: any other expression.
        TypeError: ``text`` is no string, as from ``eval``.
    """
    if not isinstance(text, str):
        raise TypeError(f"expected a string to evaluate, found {type(text).__name__}")
    try:
        if len(text) > MAX_CHARACTERS:
            raise ValueError("too long")
        return ast.literal_eval(_Computed().visit(ast.parse(text.lstrip(" \t"), mode="eval")))
    except (ArithmeticError, LookupError, MemoryError, RecursionError, SyntaxError, TypeError,
            ValueError):  # fmt: skip
        shown = repr(text[:80]) + ("..." if len(text) > 80 else "")
        raise ConfigurationError(
            "a literal value, such as (0.9, 0.98) or [(512, 3)] * 20", shown,
            "Write numbers, strings, lists, tuples or dictionaries; names and calls are not run."
        ) from None  # fmt: skip


class _Computed(ast.NodeTransformer):
    """Puts values in the places of operations, with :data:`MAX_ITEMS` items in all at most."""

    items_left = MAX_ITEMS

    def visit_BinOp(self, node: ast.BinOp) -> ast.Constant:
        apply = _OPERATORS[type(node.op)]
        operands = [ast.literal_eval(self.visit(side)) for side in (node.left, node.right)]
        if any(isinstance(value, _SEQUENCES) for value in operands):
            sizes = (
                len(operand) if isinstance(operand, _SEQUENCES) else operand for operand in operands
            )
            self.items_left -= max(0, apply(*sizes))
            if self.items_left < 0:
                raise ValueError("too many items")
        return ast.Constant(apply(*operands))

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if node.value is Ellipsis:
            raise ValueError("not a literal: Ellipsis")
        return node
