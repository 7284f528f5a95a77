"""``spectral-fairseq flags``: every flag that this package adds to ``fairseq-train``."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from dataclasses import fields
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Type

from spectral_fairseq.commands.importing import import_plugin
from spectral_fairseq.options import flag_of

DESCRIPTION = """\
List every flag that this package adds to fairseq-train, with its default and its meaning.
fairseq-train --help exits before it looks at plugins, so it shows none of them.
Example: spectral-fairseq flags spectrum
"""

INDENT = " " * 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the text to look for."""
    parser.add_argument(
        "pattern",
        nargs="?",
        default="",
        metavar="TEXT",
        help="list only flags whose name or meaning contains this text",
    )


class ListedFlag(NamedTuple):
    """One flag.

    Attributes:
        name: as typed, such as ``--spectrum-c2``.
        default: as text; empty if unset.
        meaning: its help line, with the choices where there are some.
    """

    name: str
    default: str
    meaning: str


def flag_sections() -> Dict[str, List[ListedFlag]]:
    """Heading -> its flags as they are registered, in the order of docs/flags.md."""
    from fairseq.criterions.label_smoothed_cross_entropy import (
        LabelSmoothedCrossEntropyCriterionConfig,
    )

    from spectral_fairseq.plugin.awd_lstm import AWDLSTMConfig
    from spectral_fairseq.plugin.criterion import PenalisedCriterionConfig
    from spectral_fairseq.plugin.muon import MuonConfig
    from spectral_fairseq.plugin.nt_asgd import NTASGDConfig, NTASGDScheduleConfig
    from spectral_fairseq.plugin.products import CommandOptions
    from spectral_fairseq.plugin.table_and_head import SpectralOptions
    from spectral_fairseq.plugin.task import StatefulLanguageModelingConfig
    from spectral_fairseq.plugin.transformer_xl import TransformerXLConfig

    # The dataclass of the flags, and the one whose flags are listed elsewhere.
    sections: Dict[str, Tuple[Type[Any], Optional[Type[Any]]]] = {
        "All commands": (CommandOptions, None),
        "Tables and output heads": (SpectralOptions, None),
        "Criterions": (PenalisedCriterionConfig, LabelSmoothedCrossEntropyCriterionConfig),
        "AWD-LSTM": (AWDLSTMConfig, SpectralOptions),
        "Transformer-XL": (TransformerXLConfig, SpectralOptions),
        "The task `stateful_language_modeling`": (StatefulLanguageModelingConfig, None),
        "The optimiser `muon`": (MuonConfig, None),
        "The optimiser `nt_asgd`": (NTASGDConfig, None),
        "The schedule `nt_asgd`": (NTASGDScheduleConfig, None),
    }
    return {heading: _flags(*configs) for heading, configs in sections.items()}


def default_text(value: Any) -> str:
    """A default as the lists of flags show it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(getattr(value, "value", value))


def _flags(config: Type[Any], elsewhere: Optional[Type[Any]]) -> List[ListedFlag]:
    left_out = {field.name for field in fields(elsewhere)} if elsewhere else {"data"}
    flags = []
    for field in fields(config):
        text = field.metadata.get("help")
        if field.name in left_out or not text or text == argparse.SUPPRESS:
            continue
        choices: Any = getattr(field.type, "__members__", {}).values()
        if choices:
            text += ": " + ", ".join(f"`{choice.value}`" for choice in choices)
        flags.append(ListedFlag(flag_of(field.name), default_text(field.default), text))
    return flags


def run(args: argparse.Namespace) -> int:
    """Print the flags; returns the exit status 1 if no flag contains the pattern, else 0."""
    import_plugin()
    # Fields of hydra are flags with underscores.
    wanted = args.pattern.lower().replace("_", "-")
    width = min(shutil.get_terminal_size().columns, 100)
    parts = []
    for heading, flags in flag_sections().items():
        texts = [f"{flag.name} {flag.meaning}".lower().replace("_", "-") for flag in flags]
        chosen = [flag for flag, text in zip(flags, texts) if wanted in text]
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
