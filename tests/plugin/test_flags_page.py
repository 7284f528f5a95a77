"""docs/flags.md against the dataclasses: fairseq's own --help shows no flags of plugins."""

import argparse
from dataclasses import fields
from pathlib import Path

import pytest
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
from spectral_fairseq.plugin.tasks.stateful_language_modeling import StatefulLanguageModelingConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "flags.md"
if not PAGE.exists():
    pytest.skip("the documentation is not beside these tests", allow_module_level=True)

# heading -> the dataclass of its flags, and the one whose flags are elsewhere
SECTIONS = {
    "Tables and output heads": (SpectralOptions, None),
    "Criterions": (PenalisedCriterionConfig, LabelSmoothedCrossEntropyCriterionConfig),
    "AWD-LSTM": (AWDLSTMConfig, SpectralOptions),
    "Transformer-XL": (TransformerXLConfig, SpectralOptions),
    "The task `stateful_language_modeling`": (StatefulLanguageModelingConfig, None),
    "The optimiser `nt_asgd`": (NTASGDConfig, None),
    "The schedule `nt_asgd`": (NTASGDScheduleConfig, None),
}


def shown(value):
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(getattr(value, "value", value))


def flag_rows(config, elsewhere):
    """The table of a dataclass, as the page has it."""
    left_out = {field.name for field in fields(elsewhere)} if elsewhere else {"data"}
    rows = []
    for field in fields(config):
        text = field.metadata.get("help")
        if field.name in left_out or not text or text == argparse.SUPPRESS:
            continue
        if hasattr(field.type, "__members__"):
            text += ": " + ", ".join(f"`{choice.value}`" for choice in field.type)
        text = text.replace("|", "\\|")
        flag = "--" + field.name.replace("_", "-")
        rows.append(f"| `{flag}` | {shown(field.default)} | {text} |")
    return rows


def section(heading):
    return PAGE.read_text("utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("heading", SECTIONS)
def test_flags_and_defaults(heading):
    expected = flag_rows(*SECTIONS[heading])
    found = [row for row in section(heading).splitlines() if row.startswith("| `--")]
    assert found == expected, "docs/flags.md should have\n" + "\n".join(expected)


@pytest.mark.parametrize(
    "heading, registry",
    [
        ("Criterions", CRITERION_DATACLASS_REGISTRY),
        ("AWD-LSTM", MODEL_DATACLASS_REGISTRY),
        ("Transformer-XL", MODEL_DATACLASS_REGISTRY),
    ],
)
def test_presets(heading, registry):
    lines = [row.strip("| ").split(" | ") for row in section(heading).splitlines() if "|" in row]
    header, rows = lines[0], [cells for cells in lines if cells[0].strip("`") in registry]
    assert len(rows) >= 2
    names = [flag.strip("`-").replace("-", "_") for flag in header[1:]]
    for preset, *cells in rows:
        defaults = {field.name: field.default for field in fields(registry[preset.strip("`")])}
        assert cells == [shown(defaults[name]) or "d" for name in names], preset
