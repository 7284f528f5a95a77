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
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_NUMBERS = (int, float, complex)
_SEQUENCES = (list, tuple, str, bytes)


def literal(text: str) -> Any:
    """The value of an expression of literals: numbers, strings, lists, tuples, sets, dictionaries.

    Numbers may be added, subtracted, multiplied and divided, lists, tuples and strings joined
    and repeated. Nothing is called, looked up or indexed.

    Args:
        text: the expression.

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
        return _Evaluation().value(ast.parse(text.lstrip(" \t"), mode="eval").body)
    except (ArithmeticError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        shown = repr(text[:80]) + ("..." if len(text) > 80 else "")
        raise ConfigurationError(
            "a literal value, such as (0.9, 0.98) or [(512, 3)] * 20", shown,
            "Write numbers, strings, lists, tuples or dictionaries; names and calls are not run.",
        ) from None  # fmt: skip


class _Evaluation:
    """The evaluation of one expression, which makes :data:`MAX_ITEMS` items at most."""

    def __init__(self) -> None:
        self._items_left = MAX_ITEMS

    def value(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Constant) and node.value is not Ellipsis:
            return node.value
        if isinstance(node, ast.List):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Tuple):
            return tuple(self.value(item) for item in node.elts)
        if isinstance(node, ast.Set):
            return {self.value(item) for item in node.elts}
        if isinstance(node, ast.Dict) and None not in node.keys:
            pairs = ((key, item) for key, item in zip(node.keys, node.values) if key)
            return {self.value(key): self.value(item) for key, item in pairs}
        if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](_operand(self.value(node.operand), _NUMBERS))
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return self._combined(type(node.op), self.value(node.left), self.value(node.right))
        raise ValueError(f"not a literal: {type(node).__name__}")

    def _combined(self, kind: Type[ast.AST], left: Any, right: Any) -> Any:
        if isinstance(left, _SEQUENCES) or isinstance(right, _SEQUENCES):
            if kind is ast.Mult:
                many, times = (left, right) if isinstance(left, _SEQUENCES) else (right, left)
                items = len(many) * _operand(times, int)
            elif kind is ast.Add:
                items = len(left) + len(right)
            else:
                raise ValueError("sequences are only joined and repeated")
            self._items_left -= max(0, items)
            if self._items_left < 0:
                raise ValueError("too many items")
        else:
            _operand(left, _NUMBERS)
            _operand(right, _NUMBERS)
        return _OPERATORS[kind](left, right)


def _operand(value: Any, kinds: Any) -> Any:
    if not isinstance(value, kinds):
        raise ValueError(f"not an operand: {type(value).__name__}")
    return value
