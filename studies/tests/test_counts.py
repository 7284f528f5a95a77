"""Every number in the documents that a program knows, beside what the program says. One list."""

import functools
import json
import re
import subprocess
from pathlib import Path

import pytest

from studies import opendocs
from studies.evidence import overview, report
from studies.evidence.__main__ import RESULTS
from studies.evidence.grid import STUDIES

ROOT = Path(__file__).resolve().parents[2]
WORDS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5}


@functools.cache
def records():
    """The records of all studies."""
    lines = [
        json.loads(line)
        for path in sorted(RESULTS.glob("*/records.jsonl"))
        for line in path.read_text("utf-8").split("\n")
        if line
    ]
    return [one for one in lines if "settings" not in one]


@functools.cache
def commits():
    return [one["versions"]["commit"].partition("-") for one in records()]


def trainings():
    return len(records())


def comparisons():
    return report.compared(RESULTS)[0].planned


def from_a_changed_tree():
    return sum(rest == "dirty" for _, _, rest in commits())


@functools.cache
def missing_commits():
    """Commits of records that this repository does not have; none are known in a shallow clone."""

    def git(*arguments):
        return subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("the history of this checkout is not complete")
    named = sorted({name for name, _, _ in commits()})
    return [name for name in named if git("cat-file", "-e", f"{name}^{{commit}}").returncode]


def with_a_missing_commit():
    return sum(name in missing_commits() for name, _, _ in commits())


def refused():
    found = 0
    for name, study in STUDIES.items():
        of = report.records_of(RESULTS, name, study)
        if overview.own_records(study, of):
            results = report.final_results(report.reached_stages(study, of), of)
            found += sum(one.is_refused for one in report.compare(study, results, {}, []))
    return found


def without_a_processor():
    return sum("processor" not in one["versions"] for one in records())


def passing_tests_of_fairseq():
    """What the table of compatibility.md has, which is written from a record."""
    rows = re.findall(
        r"command lines \| the last commit \| (\d+) of (\d+) \| (\d+) of",
        (ROOT / "docs" / "compatibility.md").read_text("utf-8"),
    )
    [(bare, all_of_them, with_us)] = set(rows)
    return int(with_us), int(all_of_them), int(bare)


# page, the words around the number, what it is
COUNTS = [
    ("docs/evidence.md", r"^(\d+) small models", trainings),
    ("docs/evidence.md", r"when all (\d+) comparisons", comparisons),
    ("docs/evidence.md", r"(\d+) of the 532 come from a tree", from_a_changed_tree),
    ("docs/evidence.md", r"\d+ of the (\d+) come from a tree", trainings),
    ("docs/evidence.md", r"(\d+) name one of two commits", with_a_missing_commit),
    ("docs/evidence.md", r"name one of (\w+) commits", lambda: len(missing_commits())),
    ("docs/evidence.md", r"(\d+) records, all older, do not name", without_a_processor),
    ("studies/evidence/README.md", r"processors \((\w+) with Muon after 20,000", refused),
    ("CHANGELOG.md", r"\[what was found\]\(docs/evidence.md\) in (\d+) trainings", trainings),
    (
        *("examples/translation_opendocs_de_en/README.md", r"trains all (\d+) methods"),
        lambda: len(opendocs.METHODS),
    ),
    (
        *("examples/translation_opendocs_de_en/README.md", r"methods: (\d+) trainings"),
        lambda: 2 * len(opendocs.METHODS),
    ),
    ("README.md", r"(\d+) of fairseq's", lambda: passing_tests_of_fairseq()[0]),
    ("README.md", r"of fairseq's (\d+)", lambda: passing_tests_of_fairseq()[1]),
    ("README.md", r"instead of (\d+)", lambda: passing_tests_of_fairseq()[2]),
]


@pytest.mark.parametrize(("page", "pattern", "known"), COUNTS, ids=[one[1] for one in COUNTS])
def test_a_number_in_a_document_is_what_the_program_says(page, pattern, known):
    found = re.findall(pattern, (ROOT / page).read_text("utf-8"), re.MULTILINE)
    assert found, f"{pattern} is not in {page}"
    numbers = {WORDS.get(one) or int(one.replace(",", "")) for one in found}
    assert numbers == {known()}


# the words before a difference in docs/evidence.md, its study, method, baseline, and its digits
DIFFERENCES = [
    ("20,000 updates: +", "translation_start_long", "weight_norm_init", "plain", 1),
    ("a quarter as long: +", "translation_start_long", "weight_norm_init", "short_start", 1),
    ("shorter start alone: +", "translation_start_long", "short_start", "plain", 1),
    ("starting lengths: +", "translation_start_long", "weight_norm_init", "log_count_start", 1),
    ("initialisation, 5,000 updates: +", "translation_decay_small", "weight_norm_init", "plain", 1),
    ("On another processor +", "translation_bfloat16_small", "weight_norm_init", "plain", 1),
    ("there in bfloat16 +", "translation_bfloat16_small", "init_bf16", "plain", 1),
    (
        "with the initialisation, 5,000 updates: +",
        "translation_muon_small",
        "muon_init",
        "plain",
        1,
    ),
    ("initialisation alone: +", "translation_muon_small", "muon_init", "weight_norm_init", 1),
    ("Muon alone: +", "translation_muon_small", "muon", "plain", 1),
    ("Spectrum control: open, +", "translation_decay_small", "renewed", "plain", 1),
    ("31,000 pairs, d = 128: +", "translation_medium", "weight_norm_init", "plain", 1),
    ("Transformer-XL: ", "transformer_xl_methods_small", "weight_decay", "plain", 1),
    ("language model: ", "transformer_lm_methods_small", "weight_decay", "plain", 1),
    ("with 0.2 has ", "transformer_lm_norms_small", "weight_norm_init", "plain", 1),
    ("renewed factors +", "transformer_lm_norms_small", "renewed", "plain", 1),
    ("it is level (+", "awd_lstm_decay_long", "weight_norm_init", "plain", 1),
    ("its table is level (+", "translation_rate_small", "table_rate", "plain", 2),
]


@functools.cache
def differences():
    found = report.compared(RESULTS)
    return {(one.name, one.comparison.method, one.comparison.baseline): one for one in found}


@pytest.mark.parametrize("before, study, method, baseline, digits", DIFFERENCES)
def test_a_difference_on_the_page_is_that_of_the_records(before, study, method, baseline, digits):
    """It is bold where it remains when all comparisons are adjusted together."""
    page = (ROOT / "docs" / "evidence.md").read_text("utf-8").replace("&nbsp;", " ")
    page = re.sub(r"\s+", " ", page).replace("−", "-")
    found = differences()[study, method, baseline]
    mean, low, high = (f"{value + 0.0:.{digits}f}" for value in found.comparison.test[:3])
    interval = rf"(?: \({low} to {high}\)|(?: BLEU)?, {low} to {high})"
    plain, bold = without_asterisks(page)
    (match,) = re.finditer(rf"{re.escape(before)}({mean}){interval}", plain)
    assert bold[match.start(1)] == (found.joint_p < 0.05)


def without_asterisks(page):
    """A page without its asterisks, and whether each character that is left is bold."""
    parts = page.split("**")
    return "".join(parts), [odd % 2 == 1 for odd, part in enumerate(parts) for _ in part]


def test_the_missing_commits_are_named():
    page = (ROOT / "docs" / "evidence.md").read_text("utf-8")
    assert f"({', '.join(missing_commits())})" in page


def test_the_readme_has_at_most_700_words():
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 700
