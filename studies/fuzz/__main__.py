"""``make fuzz MINUTES=..``: try options, hostile files and kills, and write down what happened.

Every case is one line of JSON in the record. A campaign that was stopped goes on where it ended,
because the record says which numbers are done; a case that was under way is done again.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import json
import os
import re
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

from benchmarks.harness import whole_records
from spectral_fairseq.provenance import versions
from studies.fuzz import data, files, forks, kills, training
from studies.work_folder import alone_with, write_text
from tests.conftest import PACKAGE, ROOT
from tests.fork_server import ForkServer

PAGE = Path(__file__).with_name("README.md")
RECORD = ROOT / "studies" / "fuzz" / "record.jsonl"
# Raise it where a number comes to mean another case: with new options, values or damages.
GENERATOR = 2
FAILURES = {*training.FAILURES, *files.FAILURES, *kills.FAILURES}
# Of twenty cases in a row: how many are options and how many files; the last one is a kill.
TURN = ("options", "file") * 9 + ("options", "kill")


@contextlib.contextmanager
def runners(folder: Path) -> Iterator[Dict[str, Callable[[int], Dict[str, Any]]]]:
    """What runs a case of each kind.

    Args:
        folder: scratch.
    """
    with contextlib.ExitStack() as stack:
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = [str(PACKAGE.parent), str(ROOT)]
        plain = stack.enter_context(ForkServer.started(sockets, path))
        server = stack.enter_context(plain.after("studies.fuzz.forks:import_plugin"))
        corpora, intact = folder / "data", folder / "intact"

        def run(argv: List[Any]) -> None:
            ended = forks.run(server, argv, folder)
            assert ended.outcome == forks.DONE, ended.printed

        corpora.mkdir(parents=True)
        data.write(corpora, run)
        language = corpora / "language"
        run(
            ["fairseq-train", language, *training.PLUGIN, *files.TRAINING, "--cpu"]
            + ["--max-update", 2, "--save-dir", intact]
        )
        checkpoint = intact / "checkpoint_last.pt"
        yield {
            "options": training.Options(server, plain, corpora, folder / "case").run,
            "file": files.Hostile(server, checkpoint, language, folder / "case").run,
            "kill": kills.Kills(server, language, folder / "kills").run,
        }


def next_cases(lines: Sequence[Dict[str, Any]]) -> Iterator[Tuple[str, int]]:
    """Kinds and numbers of the cases that are not among the lines of a record, without end."""
    done = {(line["kind"], line["number"]) for line in lines}
    for number in range(sys.maxsize):
        kind = TURN[number % len(TURN)]
        if (kind, number) not in done:
            yield kind, number


def lines_of(record: Path) -> List[Dict[str, Any]]:
    """The lines of a record, the last one of each case; one that was cut off is left out."""
    lines = whole_records(record)
    return list({(line["kind"], line["number"]): line for line in lines}.values())


def kept(line: Dict[str, Any]) -> Dict[str, Any]:
    """What the record has of a case: its end, and all of a failure; the number has the rest."""
    runs = len(line.get("commands", ())) + (line["kind"] != "file")
    short = {name: line[name] for name in ("kind", "number", "outcome")}
    found = line if line["outcome"] in FAILURES else short
    return {**found, "runs": runs, "generator": GENERATOR}


def campaign(minutes: float, record: Path, at_once: int) -> None:
    """Run cases until the time is over or somebody presses Ctrl-C.

    Args:
        minutes: the time.
        record: gets a line for each case.
        at_once: cases side by side, each in processes of its own.
    """
    end = time.monotonic() + 60 * minutes
    record.parent.mkdir(parents=True, exist_ok=True)
    lines = lines_of(record)
    # Without half a line, which a machine that failed may leave.
    write_text(record, "".join(json.dumps(line) + "\n" for line in lines))
    # Failures are tried again, and stay in the record until they have ended.
    done = [line for line in lines if line["outcome"] not in FAILURES]
    cases, lock, stopped = next_cases(done), threading.Lock(), threading.Event()

    def work(folder: Path) -> None:
        with runners(folder) as run:
            while not stopped.is_set() and time.monotonic() < end:
                with lock:
                    kind, number = next(cases)
                line = run[kind](number)
                with lock:
                    file.write(json.dumps(kept(line)) + "\n")
                    file.flush()
                print(f"{kind} {number}: {line['outcome']} {line.get('error', '')[:200]}")

    with tempfile.TemporaryDirectory() as folder, open(record, "a", encoding="utf-8") as file:
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            workers = [pool.submit(work, Path(folder) / str(i)) for i in range(at_once)]
            try:
                for worker in concurrent.futures.as_completed(workers):
                    worker.result()
            finally:
                stopped.set()


def summary(lines: List[Dict[str, Any]]) -> str:
    """The counts of a record as tables for the documentation."""
    parts = []
    titles = {
        "options": "combinations of options",
        "file": "hostile files",
        "kill": "trainings killed with SIGKILL",
    }
    for kind, title in titles.items():
        of_kind = [line for line in lines if line["kind"] == kind]
        counts = collections.Counter(line["outcome"] for line in of_kind)
        shown = "; ".join(f"{name}: {count:,}" for name, count in counts.most_common())
        runs = sum(line["runs"] for line in of_kind)
        new = sum(line.get("generator") == GENERATOR for line in of_kind)
        parts.append(f"| {title} | {len(of_kind):,} | {new:,} | {runs:,} | {shown or 'none'} |")
    failed = sum(line["outcome"] in FAILURES for line in lines)
    used = versions()
    signature = ", ".join(f"{name} {version}" for name, version in used.items() if version)
    return "\n".join(
        [
            "| what | cases | by the present generator | command lines | outcomes |",
            "|---|---|---|---|---|",
            *parts,
            "",
            f"Failures: {failed}. The latest cases: {signature}.",
        ]
    )


def write_page(lines: List[Dict[str, Any]]) -> None:
    """Put the counts between the markers of README.md."""
    text = PAGE.read_text("utf-8")
    block = f"<!-- counts -->\n{summary(lines)}\n<!-- /counts -->"
    new = re.sub(r"<!-- counts -->.*<!-- /counts -->", lambda _: block, text, flags=re.DOTALL)
    write_text(PAGE, new)


def main() -> int:
    """Read the command line; status 1 if any case of the record failed."""
    parser = argparse.ArgumentParser(prog="python -m studies.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument(
        "--at-once", type=int, default=os.cpu_count(), help="cases side by side (default: cores)"
    )
    parser.add_argument("--page", action="store_true", help="write the counts into the page")
    args = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt), alone_with(args.record, parser):
        campaign(args.minutes, args.record, args.at_once)
    lines = lines_of(args.record)
    print(summary(lines))
    if args.page:
        write_page(lines)
    failed = [line for line in lines if line["outcome"] in FAILURES]
    for one in failed:
        print(json.dumps(one))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
