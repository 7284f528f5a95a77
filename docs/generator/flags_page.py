"""Write the tables of docs/flags.md from the declarations of the flags.

Usage, from the root of the repository: python docs/generator/flags_page.py

The sections, their text and the columns of the tables of presets are written by hand; the rows are
generated.
"""

import argparse
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Dict, List, Optional

from fairseq.criterions import CRITERION_DATACLASS_REGISTRY
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.models import MODEL_DATACLASS_REGISTRY

from spectral_fairseq.plugin.criterions.penalised import PenalisedCriterionConfig
from spectral_fairseq.plugin.models.awd_lstm import AWDLSTMConfig
from spectral_fairseq.plugin.models.options import SpectralOptions
from spectral_fairseq.plugin.models.transformer_xl import TransformerXLConfig
from spectral_fairseq.plugin.optim.nt_asgd import NTASGDConfig
from spectral_fairseq.plugin.optim.nt_asgd_schedule import NTASGDScheduleConfig
from spectral_fairseq.plugin.tasks.stateful_options import StatefulLanguageModelingConfig

PAGE = Path(__file__).resolve().parents[1] / "flags.md"

# heading -> the dataclass of its flags, and the dataclass whose flags another section has
SECTIONS: Dict[str, Any] = {
    "Tables and output heads": (SpectralOptions, None),
    "Criterions": (PenalisedCriterionConfig, LabelSmoothedCrossEntropyCriterionConfig),
    "AWD-LSTM": (AWDLSTMConfig, SpectralOptions),
    "Transformer-XL": (TransformerXLConfig, SpectralOptions),
    "The task `stateful_language_modeling`": (StatefulLanguageModelingConfig, None),
    "The optimiser `nt_asgd`": (NTASGDConfig, None),
    "The schedule `nt_asgd`": (NTASGDScheduleConfig, None),
}
PRESETS = {**CRITERION_DATACLASS_REGISTRY, **MODEL_DATACLASS_REGISTRY}
FLAG_ROWS = re.compile(r"(?:^\| `--.*\n)+", re.MULTILINE)
# A table of presets: its first column has their names, and the others are headed by flags.
PRESET_TABLE = re.compile(r"^\| (?:criterion|arch) ((?:\| `--.*?` )+)\|\n.*\n((?:\|.*\n)+)", re.M)


def shown(value: Any) -> str:
    """A default as the page shows it; empty if unset."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(getattr(value, "value", value))


def flag_rows(config: Any, elsewhere: Optional[Any]) -> List[str]:
    """The rows of a table of flags: name, default, meaning."""
    left_out = {field.name for field in fields(elsewhere)} if elsewhere else {"data"}
    rows = []
    for field in fields(config):
        text = field.metadata.get("help")
        if field.name in left_out or not text or text == argparse.SUPPRESS:
            continue
        if hasattr(field.type, "__members__"):
            text += ": " + ", ".join(f"`{choice.value}`" for choice in field.type)
        flag = "--" + field.name.replace("_", "-")
        rows.append(f"| `{flag}` | {shown(field.default)} | " + text.replace("|", "\\|") + " |")
    return rows


def preset_rows(presets: List[str], flags: List[str]) -> List[str]:
    """The rows of a table of presets; "d" stands for the width of the table."""
    rows = []
    for preset in presets:
        defaults = {field.name: field.default for field in fields(PRESETS[preset])}
        values = [shown(defaults[flag.strip("-").replace("-", "_")]) or "d" for flag in flags]
        rows.append(f"| `{preset}` | " + " | ".join(values) + " |")
    return rows


def _new_preset_rows(table: "re.Match[str]") -> str:
    presets = re.findall(r"^\| `(\w+)`", table[2], re.MULTILINE)
    rows = preset_rows(presets, re.findall(r"`(--.*?)`", table[1]))
    return table[0].replace(table[2], "\n".join(rows) + "\n")


def rewritten(page: str) -> str:
    """The page with all its tables as the declarations have them."""
    head, *sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    found = []
    for section in sections:
        heading = section.splitlines()[0][3:]
        rows = "\n".join(flag_rows(*SECTIONS[heading])) + "\n"
        section, tables = FLAG_ROWS.subn(lambda _, rows=rows: rows, section)
        assert tables == 1, f"{heading}: {tables} tables of flags"
        found.append(PRESET_TABLE.sub(_new_preset_rows, section))
    return head + "".join(found)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text("utf-8")), "utf-8")
