"""``--model-overrides``: settings that replace those with which a checkpoint was trained."""

from __future__ import annotations

import ast
import difflib
from typing import Any, Dict, Mapping

from spectral_fairseq.checkpoints.settings import each_setting
from spectral_fairseq.errors import ConfigurationError, misspelt


def parse_overrides(text: str) -> Dict[str, Any]:
    """The dictionary that the flag's value spells, as in fairseq's own commands."""
    try:
        overrides = ast.literal_eval(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        overrides = None
    if not isinstance(overrides, dict) or not all(isinstance(name, str) for name in overrides):
        raise misspelt("--model-overrides to be a dictionary such as \"{'mem_len': 640}\"", text)
    return overrides


def check_overrides(checkpoint: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Refuse overrides of settings that a checkpoint does not have; fairseq would ignore them."""
    nodes = {name: checkpoint.get(name) for name in ("args", "cfg")}
    known = {str(name) for _, name, _ in each_setting(nodes, "the checkpoint")}
    for name in overrides:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=3)
            raise ConfigurationError(
                "--model-overrides of settings that the checkpoint has",
                f"{name!r}, which it does not have",
                f"Did you mean {' or '.join(near)}?" if near else "Correct or drop it.",
            )
