"""The table of docs/compatibility.md, made of the record."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Dict, List

from studies.work_folder import write_text
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "compatibility.md"
RECORD = Path(__file__).with_name("record.json")
_BLOCK = re.compile(r"<!-- matrix -->.*<!-- /matrix -->", re.DOTALL)

Record = Dict[str, Dict[str, Any]]


def read_record() -> Record:
    """Results of the cells that have been run, by their names."""
    return dict(json.loads(RECORD.read_text("utf-8"))) if RECORD.exists() else {}


def write_record(record: Record) -> None:
    """Write the record, in the order of the cells' names, and the page."""
    ordered = {name: record[name] for name in sorted(record, key=_order)}
    write_text(RECORD, json.dumps(ordered, indent=1) + "\n")
    write_text(PAGE, _BLOCK.sub(lambda _: block(record), PAGE.read_text("utf-8")))


def block(record: Record) -> str:
    """The part of the page that follows from the record."""
    names = sorted(record, key=_order)
    rows = [
        "| Python | fairseq | torch | numpy | tests passed |",
        "|---|---|---|---|---|",
        *(_row(record[name]) for name in names),
        "",
        _readers(record),
    ]
    rows += _existing_rows({name: record[name] for name in names if "existing" in record[name]})
    for name in names:
        rows += _training_rows(record[name].get("training", {}))
    failures = [line for name in names for line in _failures(name, record[name])]
    below = ["", "What failed:", "", *failures] if failures else []
    return "\n".join(["<!-- matrix -->", *rows, *below, "<!-- /matrix -->"])


def _existing_rows(record: Record) -> List[str]:
    """What pip added to environments that existed, and what fairseq's own tests say there."""
    rows: List[str] = []
    into: Dict[str, List[str]] = {}  # what pip added -> the environments
    tests = ["", "fairseq's own tests in them, without and with the plugin:", ""]
    tests += ["| fairseq | torch | tests | of | passed without | passed with | newly failed |"]
    tests += ["|---|---|---|---|---:|---:|---:|"]
    several = len(tests)
    for cell in record.values():
        found = cell["existing"]
        head = " | ".join(str(cell["versions"].get(key) or "") for key in ("fairseq", "torch"))
        if "added" in found:
            into.setdefault(" and ".join(found["added"]), []).append(
                head.replace(" | ", " with torch ")
            )
        for commit, parts in found.get("host_tests", {}).items():
            of = "the last commit" if commit == "HEAD" else commit
            for part, counts in parts.items():
                passed = [
                    f"{one['passed']} of {one['passed'] + one['failed']}"
                    for one in (counts["without"], counts["with"])
                ]
                newly = len(counts["newly_failed"])
                tests.append(f"| {head} | {part} | {of} | {' | '.join(passed)} | {newly} |")
    for added, environments in into.items():
        rows += ["", f"pip added {added}, and changed nothing, beside {'; '.join(environments)}."]
    return rows + (tests if len(tests) > several else [])


def _training_rows(found: Record) -> List[str]:
    """What ``tests/training`` says beside other versions of the frameworks, without fairseq."""
    rows = ["", "`spectral_fairseq.training` without fairseq, by its own tests:", ""]
    rows += ["| transformers | accelerate | Lightning | tests passed |", "|---|---|---|---|"]
    for name in sorted(found, key=_order):
        versions = [
            str(found[name].get(key, "")) for key in ("transformers", "accelerate", "lightning")
        ]
        cells = [*versions, _passed(found[name])]
        rows.append(f"| {' | '.join(cells)} |")
    return rows if found else []


def _order(name: str) -> List[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)]


def _row(cell: Dict[str, Any]) -> str:
    versions = [
        cell["versions"].get(key) or "none" for key in ("python", "fairseq", "torch", "numpy")
    ]
    return f"| {' | '.join([*versions, _passed(cell.get('tests', {}))])} |"


def _passed(counts: Dict[str, Any]) -> str:
    """How many tests passed, and how many failed, if any did."""
    failed = counts.get("failed")
    return f"{counts.get('passed', '')}" + (f", {failed} failed" if failed else "")


def _readers(record: Record) -> str:
    """In how many pairs of cells that were tried one reads what the other has trained."""
    tried = [error for cell in record.values() for error in cell.get("reads", {}).values()]
    read = sum(not error for error in tried)
    return f"Of {len(tried)} pairs of rows, {read} read each other's checkpoints."


def _failures(name: str, cell: Dict[str, Any]) -> List[str]:
    tests = [f"the test `{failed}`" for failed in cell.get("tests", {}).get("failures", ())]
    reads = [f"{other}: {error}" for other, error in cell.get("reads", {}).items() if error]
    rooms = cell.get("training", {}).values()
    tests += [f"the test `{failed}`" for one in rooms for failed in one.get("failures", ())]
    of = (cell, cell.get("existing", {}), *rooms)
    errors = [one["error"] for one in of if one.get("error")]
    return [f"- {name}: {what}" for what in (*errors, *tests, *reads)]
