"""What the forms of spectrum control cost in learning: trainings side by side, one table.

Three small models: a Transformer that translates (Adam), an AWD-LSTM (SGD at a rate of 30) and a
Transformer-XL (Adam); every variant of the table with every seed, for equally many updates.
Validation loss over training and the table's spectrum come from fairseq's logs. What is recorded
is not done again, and a training that was interrupted goes on: give the same command.

    python -m studies.spectrum --sotu FOLDER    # made by examples/lm_sotu/sotu.py
    python -m studies.spectrum --page           # only write the table of studies/spectrum
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.harness import positive, print_result
from studies.json_lines import add_records
from studies.spectrum.grid import TASKS, VARIANTS, suits
from studies.spectrum.report import RESULTS, Key, key_of, markdown, recorded, rows, write_page
from studies.spectrum.training import prepare, train
from studies.work_folder import WorkDir


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--work-dir", type=Path, default=Path("outputs/spectrum_study"))
    add("--sotu", type=Path, default=Path("sotu"), help="folder with train.tokens, valid.tokens")
    add("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    add("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="VARIANT")
    add("--seeds", nargs="+", type=int, default=[1, 2, 3])
    add("--updates", type=positive, help="of every run, with --results; each task's own if unset")
    add("--at-once", type=positive, default=2)
    add("--results", type=Path, default=RESULTS, help="what it has is not trained again")
    add("--page", action="store_true", help="train nothing; write the table of studies/spectrum")
    args = parser.parse_args()
    if args.page:
        write_page(recorded(args.results))
        return
    if args.updates and args.results.resolve() == RESULTS.resolve():
        parser.error(
            f"expected --results FILE beside --updates; found none, and {RESULTS.name} is of each "
            "task's own number of updates. Name a file of your own."
        )
    with WorkDir(args.work_dir.resolve()).locked():
        train_all(args)
    records = recorded(args.results)
    print(markdown(records))
    print_result("spectrum_study", rows=rows(records))


def train_all(args: argparse.Namespace) -> None:
    """Train what is not recorded yet, and record it."""
    work, known = args.work_dir.resolve(), set(map(key_of, recorded(args.results)))
    due = [
        (task, variant, seed)
        for seed in args.seeds
        for variant in args.variants
        for task in args.tasks
        if suits(task, variant) and (task, variant, seed) not in known
    ]
    args.results.parent.mkdir(parents=True, exist_ok=True)
    prepare(work / "data", args.sotu.resolve(), sorted({TASKS[task].data for task, _, _ in due}))
    torch.set_num_threads(1)

    def run(key: Key) -> None:
        updates = args.updates or TASKS[key[0]].updates
        add_records(args.results, [train(*key, work, updates)])
        print("trained", *key, flush=True)

    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(run, due))


if __name__ == "__main__":
    main()
