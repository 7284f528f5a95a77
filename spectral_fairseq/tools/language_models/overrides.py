"""``--model-overrides``: settings that replace those with which a checkpoint was trained."""

from __future__ import annotations

import ast
import difflib
from typing import Any, Dict, Iterator, List, Mapping, Set

from spectral_fairseq.errors import ConfigurationError


def parse_overrides(text: str) -> Dict[str, Any]:
    """The dictionary that the flag's value spells, as in fairseq's own commands.

    Args:
        text: a Python dictionary of literals, such as ``{'mem_len': 640}``.

    Raises:
        ConfigurationError: anything else.
    """
    try:
        found = ast.literal_eval(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigurationError(
            "--model-overrides to be a dictionary of settings",
            repr(text),
            "Write it as in --model-overrides \"{'mem_len': 640}\".",
        )
    return found


def check_overrides(checkpoint: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Refuse overrides of settings that a checkpoint does not have; fairseq would ignore them.

    Args:
        checkpoint: as loaded.
        overrides: name of a setting -> its new value.

    Raises:
        ConfigurationError: the first unknown setting, with those of similar names.
    """
    known = set(_setting_names(checkpoint.get("cfg"))) | set(_setting_names(checkpoint.get("args")))
    for name in overrides:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=3)
            raise ConfigurationError(
                "--model-overrides of settings that the checkpoint has",
                f"{name!r}, which it has not",
                f"Did you mean {' or '.join(near)}?" if near else "Correct or drop it.",
            )


def _setting_names(settings: Any) -> Iterator[str]:
    """The names in nested settings; what is held twice, or by itself, is read once."""
    pending: List[Any] = [settings]
    seen: Set[int] = set()
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        node = node if isinstance(node, Mapping) else getattr(node, "__dict__", {})
        for name, value in node.items():
            yield str(name)
            if isinstance(value, Mapping) or type(value).__name__ == "Namespace":
                pending.append(value)
