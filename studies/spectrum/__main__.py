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
from pathlib import Path

import torch

from benchmarks.harness import positive, print_result
from studies.json_lines import add_records
from studies.running import Job, Usage, run_jobs
from studies.spectrum.grid import TASKS, VARIANTS, suits
from studies.spectrum.report import RESULTS, key_of, markdown, recorded, rows, write_page
from studies.spectrum.training import SpectrumRun, prepare
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
    work = WorkDir(args.work_dir.resolve())
    with work.locked():
        train_all(args, work)
    records = recorded(args.results)
    print(markdown(records))
    print_result("spectrum_study", rows=rows(records))


def train_all(args: argparse.Namespace, work: WorkDir) -> None:
    """Train what is not recorded yet, and record it."""
    known = set(map(key_of, recorded(args.results)))
    due = [
        (task, variant, seed)
        for seed in args.seeds
        for variant in args.variants
        for task in args.tasks
        if suits(task, variant) and (task, variant, seed) not in known
    ]
    args.results.parent.mkdir(parents=True, exist_ok=True)
    prepare(
        work.root / "data", args.sotu.resolve(), sorted({TASKS[task].data for task, _, _ in due})
    )
    torch.set_num_threads(1)

    runs = [SpectrumRun(key, work, args.updates or TASKS[key[0]].updates) for key in due]
    for run in runs:
        run.keep_flags()

    def finish(run: SpectrumRun) -> None:
        add_records(args.results, [run.record()])
        run.remove_checkpoints()  # a run that was stopped before its record is not trained again
        print("trained", run.label, flush=True)

    left = {run.label: run for run in runs if not run.is_trained()}
    for run in runs:
        if run.label not in left:
            finish(run)

    def ended(job: Job, usage: Usage) -> None:
        run = left[job.label]
        run.training_ended(usage)
        if usage.exit_status == 0:
            finish(run)

    jobs = [run.training() for run in left.values()]
    lock = work.lock.fileno()
    run_jobs(jobs, at_once=args.at_once, threads=1, gpu=False, lock_fd=lock, on_end=ended)


if __name__ == "__main__":
    main()
