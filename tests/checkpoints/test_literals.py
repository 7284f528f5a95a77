"""Expressions of literals: equal to what eval gives, and nothing else is run."""

import pytest

from spectral_fairseq.checkpoints.settings import MAX_ITEMS, literal
from spectral_fairseq.errors import ConfigurationError

GOOD = [
    "(0.9, 0.98)",
    "10,20",
    "  [1]",
    "True",
    "None",
    "1e-3",
    "-1",
    "+1.5",
    "0.5 / 4",
    "2 - 1",
    "[(512, 3)] * 20",
    "3 * [True]",
    "[(512, 3)] * 9 + [(1024, 3)] * 4",
    "[1] * 2 + [2] * (1 + 2)",
    "{'a': [1, 2], 'b': None}",
    "{1, 2}",
    "'a' + \"b\"",
    "b'a' * 2",
    "1 + 2j",
    "()",
    "[]",
    "{}",
    "[(1, 64),\n (2, 128)]",
]

BAD = [
    "",
    "()()",
    "print",
    "print()",
    "__import__('os').system('true')",
    "[].__class__",
    "(1)[0]",
    "[x for x in (1, 2)]",
    "lambda: 0",
    "f'{1}'",
    "1 if 1 else 2",
    "1 and 2",
    "not 1",
    "1 < 2",
    "{**{}}",
    "[*[1]]",
    "...",
    "1; 2",
    "a = 1",
    "(a := 1)",
    "2 ** 3",
    "2 // 1",
    "1 @ 2",
    "~1",
    "'a' - 'b'",
    "'%s' % 1",
    "[1] * 1.5",
    "[1] + (2,)",
    "-'a'",
    "1 + 'a'",
    "1 / 0",
    "{[]}",
    "[1] * 10**9",
    f"[1] * {MAX_ITEMS + 1}",
    "[" + "[0] * 100000," * 11 + "]",
    f"[[1] * -{MAX_ITEMS}, [1] * {MAX_ITEMS}, [1] * 2]",
    f"['a' * 1000] * 1000 + [1] * {MAX_ITEMS}",
    "(" * 5000 + ")" * 5000,
    "-" * 100_000 + "1",
    "[" * 150,
    "1" * 5_000_000,
    "\x00",
]


@pytest.mark.parametrize("text", GOOD)
def test_equals_eval(text):
    found = literal(text)
    assert found == eval(text) and type(found) is type(eval(text))


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:20] or "empty")
def test_anything_else_is_refused(text):
    with pytest.raises(ConfigurationError, match="literal value") as caught:
        literal(text)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [None, 1, [1], b"1"])
def test_what_is_no_string_fails_as_in_eval(value):
    with pytest.raises(TypeError):
        literal(value)
