"""``make matrix``: install, test and train in each cell, and write docs/compatibility.md's table.

A cell that is in the record is not repeated, so that an interrupted matrix goes on. At the end,
each cell reads the checkpoints of all others; for this the environments stay in the folder, some
gigabytes each, unless ``--discard`` is given. Cells without fairseq run the tests that need none.
Some cells also have an environment that exists before this package comes (existing.py); with
``--upstream`` fairseq's own tests run in it. One cell has environments without fairseq beside it,
with other versions of transformers (frameworks.py).
"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path
from typing import Any, Dict, Iterable, Tuple

from studies.matrix.cells import CELLS, EXISTING, NONE
from studies.matrix.existing import Existing
from studies.matrix.frameworks import FRAMEWORKS, HOST, Room
from studies.matrix.page import RECORD, read_record, write_record
from studies.matrix.steps import SELECTIONS, Failure, Installation
from studies.work_folder import alone_with
from tests.conftest import ROOT


def run_cell(installation: Installation, selection: str, flags: str) -> Dict[str, Any]:
    """What is recorded of a cell; ``error`` names the step that failed, if one did."""
    cell = installation.cell
    found: Dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "versions": {"python": cell.python, "torch": cell.torch, "numpy": cell.numpy},
    }
    step = "installation"
    try:
        found["versions"] = installation.install()
        if cell.fairseq != NONE:
            step = "training"
            found["loss"] = installation.train()
        step = "tests"
        found["tests"] = installation.test(selection, flags)
    except Failure as failure:
        found["error"] = f"{step}: {failure}"
    return found


def read_others(
    installations: Dict[str, Installation], record: Dict[str, Any]
) -> Iterable[Tuple[str, str, str]]:
    """Let every cell that has an environment read the checkpoints that it has not read yet.

    Yields:
        The names of both cells, and what went wrong or nothing.
    """
    for name, reader in installations.items():
        if name not in record or not reader.is_made() or reader.cell.fairseq == NONE:
            continue
        for other, writer in installations.items():
            loss = record.get(other, {}).get("loss")
            known = record[name].get("reads", {})
            if loss is None or other in known or not writer.checkpoint.exists():
                continue
            try:
                reader.read(writer.checkpoint, loss)
                yield name, other, ""
            except Failure as failure:
                yield name, other, str(failure)


def run_existing(environment: Existing, host_tests: bool) -> Dict[str, Any]:
    """What is recorded of an environment that exists; ``error`` says what went wrong, if it did."""
    found: Dict[str, Any] = {"date": datetime.date.today().isoformat()}
    try:
        found.update(environment.check())
        if host_tests:
            found["host_tests"] = environment.host_tests()
    except Failure as failure:
        found["error"] = str(failure)
    return found


def forget(record: Dict[str, Any], name: str) -> None:
    """Remove a cell from the record, and what others found in its checkpoint."""
    record.pop(name, None)
    for cell in record.values():
        cell.get("reads", {}).pop(name, None)


def main() -> int:
    """Read the command line, and :func:`run`."""
    parser = argparse.ArgumentParser(prog="python -m studies.matrix", description=__doc__)
    parser.add_argument(
        "cells", nargs="*", metavar="CELL", help=f"all unless given: {', '.join(CELLS)}"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "matrix")
    parser.add_argument(
        "--upstream", type=Path, help="clone of fairseq's repository, for the cells built from it"
    )
    parser.add_argument("--tests", choices=SELECTIONS, default="fast")
    parser.add_argument(
        "--existing", action="store_true", help="only the environments that exist, anew"
    )
    parser.add_argument(
        "--training", action="store_true", help="only the versions of transformers, anew"
    )
    parser.add_argument("--again", action="store_true", help="repeat cells that are in the record")
    parser.add_argument(
        "--discard", action="store_true", help="remove each environment when its cell is done"
    )
    parser.add_argument("--pytest-flags", default="", help="such as '-n 1'")
    args = parser.parse_args()
    unknown = set(args.cells) - set(CELLS)
    if unknown:
        parser.error(f"expected cells among {', '.join(CELLS)}; found {', '.join(unknown)}")
    with alone_with(RECORD, parser):
        return run(args)


def run(args: argparse.Namespace) -> int:
    """Run what is not in the record; status 1 if anything failed in a chosen cell."""
    chosen = args.cells or list(CELLS)
    folder = args.folder.resolve()
    upstream = args.upstream and args.upstream.resolve()
    installations = {
        name: Installation(cell, folder / name, upstream) for name, cell in CELLS.items()
    }
    record = read_record()
    for name in chosen:
        if args.existing or args.training or (name in record and not args.again):
            continue
        print(f"[{name}]", flush=True)
        forget(record, name)
        record[name] = run_cell(installations[name], args.tests, args.pytest_flags)
        print(f"[{name}] {record[name]}", flush=True)
        write_record(record)
        _cross(installations, record)
        if args.discard:
            installations[name].remove()
    for name in set(chosen) & set(EXISTING) & set(record):
        if args.existing or not (args.training or "existing" in record[name]):
            environment = Existing(CELLS[name], folder / name, upstream)
            record[name]["existing"] = run_existing(environment, upstream is not None)
            print(f"[{name}] existing: {record[name]['existing']}", flush=True)
            write_record(record)
            if args.discard:
                environment.remove()
    for name in FRAMEWORKS if HOST in chosen and HOST in record else ():
        rooms = record[HOST].setdefault("training", {})
        if args.training or not (args.existing or name in rooms):
            room = Room(FRAMEWORKS[name], CELLS[HOST], folder / HOST)
            rooms[name] = room.check()
            print(f"[{HOST}] {name}: {rooms[name]}", flush=True)
            write_record(record)
            if args.discard:
                room.remove()
    _cross(installations, record)
    return int(any(_failed(record[name]) for name in chosen))


def _cross(installations: Dict[str, Installation], record: Dict[str, Any]) -> None:
    for name, other, error in read_others(installations, record):
        print(f"[{name}] reads {other}: {error or 'yes'}", flush=True)
        record[name].setdefault("reads", {})[other] = error
        write_record(record)


def _failed(cell: Dict[str, Any]) -> bool:
    reads = cell.get("reads", {}).values()
    parts = (cell, cell.get("existing", {}), *cell.get("training", {}).values())
    failed = any(one.get("error") or one.get("failed") for one in (*parts, cell.get("tests", {})))
    host = cell.get("existing", {}).get("host_tests", {})
    broken = any(counts["newly_failed"] for of in host.values() for counts in of.values())
    return failed or broken or any(reads)


if __name__ == "__main__":
    sys.exit(main())
