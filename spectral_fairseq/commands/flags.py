"""``spectral-fairseq flags``: every flag that this package adds to ``fairseq-train``."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spectral_fairseq.commands.shared import import_plugin
from spectral_fairseq.options import option

if TYPE_CHECKING:
    from spectral_fairseq.commands.plugin_flags import ListedFlag


DESCRIPTION = """\
List every flag that this package adds to fairseq-train, with its default and its meaning.
fairseq-train --help exits before it looks at plugins, so it shows none of them.
"""

INDENT = " " * 6


@dataclass
class Arguments:
    """The arguments of ``flags``."""

    pattern: str = option(
        "",
        "list only flags whose name or meaning contains this text",
        metavar="TEXT",
        positional=True,
        nargs="?",
    )


def _searched(flag: ListedFlag) -> str:
    return f"{flag.name} {flag.meaning}".lower().replace("_", "-")


def run(args: Arguments) -> int:
    """Print the flags; returns the exit status 1 if no flag contains the pattern, else 0."""
    import_plugin()
    from spectral_fairseq.commands.plugin_flags import flag_sections

    # Fields of hydra are flags with underscores.
    wanted = args.pattern.lower().replace("_", "-")
    width = min(shutil.get_terminal_size().columns, 100)
    parts = []
    for heading, flags in flag_sections().items():
        chosen = [flag for flag in flags if wanted in _searched(flag)]
        if chosen:
            parts.append(heading.replace("`", ""))
        for flag in chosen:
            default = f" (default: {flag.default})" if flag.default else ""
            parts.append(f"  {flag.name}{default}")
            text = textwrap.fill(
                flag.meaning.replace("`", ""), width - len(INDENT), break_on_hyphens=False
            )
            parts.append(textwrap.indent(text, INDENT))
    print("\n".join(parts) if parts else f"No flag contains {args.pattern!r}.")
    return 0 if parts else 1
