"""Write the tables of docs/flags.md.

Usage, from the root of the repository: python docs/generator/flags_page.py

The sections, their text and the columns of the tables of presets are written by hand; the rows are
generated.
"""

import re
from dataclasses import fields
from pathlib import Path
from typing import List

from fairseq.criterions import CRITERION_DATACLASS_REGISTRY
from fairseq.models import MODEL_DATACLASS_REGISTRY

from spectral_fairseq.commands.flags import ListedFlag, default_text, flag_sections
from spectral_fairseq.refusals import REFUSALS

PAGE = Path(__file__).resolve().parents[1] / "flags.md"

PRESETS = {**CRITERION_DATACLASS_REGISTRY, **MODEL_DATACLASS_REGISTRY}
FLAG_ROWS = re.compile(r"(?:^\| `--.*\n)+", re.MULTILINE)
# A table of presets: its first column has their names, and the others are headed by flags.
PRESET_TABLE = re.compile(r"^\| (?:criterion|arch) ((?:\| `--.*?` )+)\|\n.*\n((?:\|.*\n)+)", re.M)


def flag_row(flag: ListedFlag) -> str:
    """The row of a flag: name, default, meaning."""
    return f"| `{flag.name}` | {flag.default} | " + flag.meaning.replace("|", "\\|") + " |"


def preset_rows(presets: List[str], flags: List[str]) -> List[str]:
    """The rows of a table of presets; the text below it says what the unset ones are."""
    rows = []
    for preset in presets:
        defaults = {field.name: field.default for field in fields(PRESETS[preset])}
        unset = "by table" if preset in CRITERION_DATACLASS_REGISTRY else "d"
        values = [
            default_text(defaults[flag.strip("-").replace("-", "_")]) or unset for flag in flags
        ]
        rows.append(f"| `{preset}` | " + " | ".join(values) + " |")
    return rows


def _new_preset_rows(table: "re.Match[str]") -> str:
    presets = re.findall(r"^\| `(\w+)`", table[2], re.MULTILINE)
    rows = preset_rows(presets, re.findall(r"`(--.*?)`", table[1]))
    return table[0].replace(table[2], "\n".join(rows) + "\n")


REFUSALS_HEADING = "What is refused before training"
REFUSED = "| refused | with | which needs | what to do |\n|---|---|---|---|\n"


def with_refusals(section: str) -> str:
    """The section with its table of refusals as :mod:`spectral_fairseq.refusals` has it."""
    rows = "".join(
        f"| {one.refused} | {one.feature} | {one.needs} | {one.remedy} |\n" for one in REFUSALS
    )
    text, tables = re.subn(re.escape(REFUSED) + r"(?:\|.*\n)*", lambda _: REFUSED + rows, section)
    assert tables == 1, f"{tables} tables of refusals"
    return text


def rewritten(page: str) -> str:
    """The page with all its tables as the declarations have them."""
    head, *sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    flags = flag_sections()
    found = []
    for section in sections:
        heading = section.splitlines()[0][3:]
        if heading == REFUSALS_HEADING:
            found.append(with_refusals(section))
            continue
        rows = "\n".join(map(flag_row, flags[heading])) + "\n"
        section, tables = FLAG_ROWS.subn(lambda _, rows=rows: rows, section)
        assert tables == 1, f"{heading}: {tables} tables of flags"
        found.append(PRESET_TABLE.sub(_new_preset_rows, section))
    return head + "".join(found)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text("utf-8")), "utf-8")
