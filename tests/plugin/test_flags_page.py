"""docs/flags.md has every flag, because fairseq's own --help shows no flags of plugins."""

import importlib.util
from pathlib import Path

import pytest

from spectral_fairseq.commands.flags import flag_sections
from spectral_fairseq.embeddings import TABLES
from spectral_fairseq.plugin.criterion import PenalisedCriterionConfig
from spectral_fairseq.plugin.presets import PRESETS
from spectral_fairseq.refusals import REFUSALS

GENERATOR = Path(__file__).resolve().parents[2] / "docs" / "generator" / "flags_page.py"
if not GENERATOR.exists():
    pytest.skip("the documentation is not beside these tests", allow_module_level=True)


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("flags_page", GENERATOR)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page(generator):
    return generator.PAGE.read_text("utf-8")


def test_the_page_is_as_generated(generator, page):
    assert page == generator.rewritten(page), "run: python docs/generator/flags_page.py"


def test_the_page_has_every_refusal(page):
    assert all(f"| {one.feature} | {one.needs} |" in page for one in REFUSALS)


def test_the_page_has_every_section_and_criterion(page):
    for heading in flag_sections():
        assert f"\n## {heading}\n" in page
    for preset in PRESETS:
        assert f"\n| `{preset}` | " in page


def test_defaults_and_choices_are_shown(page):
    for row in (
        "| `--embedding-type` | plain | ",
        "| `mle_cosreg` | 1 | 0 | 0,0,0,0 | 0 |",
        "| `awd_lstm_wt2` | softmax | 0 | 400 | 1150 | d | 0.65 | 0.2 |",
        "| `--variable-bptt` | off | ",
    ):
        assert f"\n{row}" in page
    kinds = ", ".join(f"`{kind.kind}`" for kind in TABLES)
    assert f": {kinds} |\n" in page


def test_a_changed_default_changes_the_page(generator, page, monkeypatch):
    field = PenalisedCriterionConfig.__dataclass_fields__["weight_norm_target"]
    monkeypatch.setattr(field, "default", 2.25)
    assert "| `--weight-norm-target` | 2.25 |" in generator.rewritten(page)
    assert generator.rewritten(page).count("\n") == page.count("\n")
