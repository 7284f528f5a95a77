"""``fairseq-validate`` without ``--task`` says that the flag is missing.

This patch only changes an error message. It is worth its lines because fairseq's other commands
need no ``--task`` for translation, and this one answers with ``KeyError: None``.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any, Callable

from spectral_fairseq.compat.patching import Patch, replaces


def require_task(parse_args_and_arch: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``parse_args_and_arch`` so that a parser without a default task asks for ``--task``.

    Args:
        parse_args_and_arch: fairseq's function.

    Returns:
        A function of the same signature.
    """

    @functools.wraps(parse_args_and_arch)
    def parse_with_task(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        for action in parser._actions:
            if action.dest == "task" and action.default is None:
                action.required = True
        return parse_args_and_arch(parser, *args, **kwargs)

    return parse_with_task


PATCH = Patch(
    name="task of fairseq-validate",
    reason="fairseq-validate without --task fails with 'KeyError: None'.",
    install=replaces({"fairseq.options:parse_args_and_arch": require_task}),
)
