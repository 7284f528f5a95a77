"""What the forms of spectrum control cost in learning: trainings side by side, one table.

Three small models: a Transformer that translates (Adam), an AWD-LSTM (SGD at a rate of 30) and a
Transformer-XL (Adam); every variant of the table with every seed, for equally many updates.
Validation loss over training and the table's spectrum come from fairseq's logs. What is finished
is not done again: after an interruption give the same command.

    python -m benchmarks.spectrum_study --sotu FOLDER    # made by examples/lm_sotu/sotu.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

import spectral_fairseq
from benchmarks.corpora import ROOT, language_model_data, translation_data
from benchmarks.harness import positive, print_result
from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.checkpoints.tables import extract_table
from spectral_fairseq.functional.linalg.singular_values import right_singular_system
from spectral_fairseq.functional.measures.mean_cosine import mean_cosine
from spectral_fairseq_examples.common.fairseq_log import log_records
from spectral_fairseq_examples.common.jobs import KEEP_FREED_MEMORY

PAIRS, SUBWORDS, WORDS = 10_000, 2_000, 4_000
WINDOW = 300  # updates between two points of a curve


class Task(NamedTuple):
    """A model to train.

    Args:
        data: which binary data.
        updates: as many for each variant.
        flags: common to all variants.
        plain: arch with a plain table.
        factored: arch with an SVD table.
    """

    data: str
    updates: int
    flags: str
    plain: str
    factored: str


TASKS = {
    "translation": Task(
        "translation",
        1_500,
        "--source-lang de --target-lang en --share-all-embeddings --label-smoothing 0.1 "
        "--encoder-embed-dim 64 --decoder-embed-dim 64 --encoder-ffn-embed-dim 128 "
        "--decoder-ffn-embed-dim 128 --encoder-layers 2 --decoder-layers 2 "
        "--encoder-attention-heads 2 --decoder-attention-heads 2 --dropout 0.1 "
        "--optimizer adam --adam-betas (0.9,0.98) --lr 0.002 --lr-scheduler inverse_sqrt "
        "--warmup-updates 400 --clip-norm 1.0 --max-tokens 1600 --validate-interval-updates 300",
        "--arch transformer",
        "--arch transformer_sc",
    ),
    "awd_lstm": Task(
        "language_model",
        1_500,
        "--task stateful_language_modeling --batch-size 20 --batch-size-valid 10 "
        "--tokens-per-sample 35 --variable-bptt --decoder-embed-dim 64 --decoder-hidden-size 128 "
        "--decoder-layers 3 --dropout 0.2 --input-dropout 0.2 --hidden-dropout 0.1 "
        "--word-dropout 0.05 --weight-drop 0.2 --blockwise-loss --optimizer nt_asgd "
        "--lr-scheduler nt_asgd --lr 30 --weight-decay 1.2e-6 --clip-norm 0.25 "
        "--validate-interval-updates 300 --max-valid-steps 100",
        "--arch awd_lstm_wt2",
        "--arch awd_lstm_wt2 --embedding-type svd",
    ),
    "transformer_xl": Task(
        "language_model",
        1_200,
        "--task stateful_language_modeling --batch-size 20 --batch-size-valid 10 "
        "--tokens-per-sample 64 --decoder-embed-dim 64 --decoder-ffn-embed-dim 256 "
        "--decoder-attention-heads 4 --mem-len 64 --adaptive-softmax-cutoff 1000,2500 "
        "--optimizer adam --lr 0.001 --warmup-updates 200 --lr-scheduler cosine --clip-norm 0.25 "
        "--validate-interval-updates 300 --max-valid-steps 100",
        "--arch transformer_xl_wt103_small",
        "--arch transformer_xl_wt103_small --embedding-type svd",
    ),
}

NO_PENALTY = "--criterion mle_cosreg --cosreg-weight 0"
CONTROL = "--criterion spectrum_control"
FACTORED = f"{CONTROL} --svd-interval 0"
ABOVE = f"{NO_PENALTY} --spectrum-slack 1.5 --spectrum-decay"
# With the interval of 10 an ETA of 0.01 goes a tenth of the way each time, and 0.1 all of it.
VARIANTS: Dict[str, str] = {
    "plain": NO_PENALTY,
    "factored": FACTORED,
    "factored_renewed": f"{CONTROL} --svd-interval 10",
    "factored_l3": f"{FACTORED} --orthogonality-weights 0.001,0.001,0.001,0",
    "factored_l3_strong": f"{FACTORED} --orthogonality-weights 0.001,0.001,0.1,0.1",
    "penalty_0.0001": f"{NO_PENALTY} --spectrum-weight 0.0001",
    "penalty_0.01": f"{NO_PENALTY} --spectrum-weight 0.01",
    "above_1.5": f"{ABOVE} 0.01",
    "above_1.2": f"{NO_PENALTY} --spectrum-decay 0.01 --spectrum-slack 1.2",
    "above_2": f"{NO_PENALTY} --spectrum-decay 0.01 --spectrum-slack 2",
    "above_1.5_gentle": f"{ABOVE} 0.001",
    "above_1.5_full": f"{ABOVE} 0.1",
    "above_1.5_late": f"{ABOVE} 0.01 --spectrum-decay-start 600",
    "above_1.5_fixed": f"{ABOVE} 0.01 --spectrum-scale fixed",
    "above_1.5_c2": f"{ABOVE} 0.01 --spectrum-c2 0.01",
    "both_free": f"{NO_PENALTY} --spectrum-decay 0.01 --spectrum-side both",
    "both_free_c2": f"{NO_PENALTY} --spectrum-decay 0.01 --spectrum-side both --spectrum-c2 0.01",
    "both_fixed": (
        f"{NO_PENALTY} --spectrum-decay 0.01 --spectrum-side both --spectrum-scale fixed"
    ),
    "centred": f"{NO_PENALTY} --table-centering 0.1",
    "centred_gentle": f"{NO_PENALTY} --table-centering 0.01",
    "centred_above_1.5": f"{ABOVE} 0.1 --table-centering 0.1",
    "centred_above_2": (
        f"{NO_PENALTY} --table-centering 0.1 --spectrum-decay 0.1 --spectrum-slack 2"
    ),
    "centred_above_3": (
        f"{NO_PENALTY} --table-centering 0.1 --spectrum-decay 0.1 --spectrum-slack 3"
    ),
    "default": CONTROL,
    "averaged_plain": f"{NO_PENALTY} --nt-asgd-from-start",
    "averaged_above_1.5": f"{ABOVE} 0.01 --nt-asgd-from-start",
}


def suits(task: str, variant: str) -> bool:
    """Whether a task can be trained with a variant: renewed factors cannot be averaged."""
    averages = task == "awd_lstm"
    return not variant.startswith("factored_renewed" if averages else "averaged")


def prepare(folder: Path, sotu: Path, data: Sequence[str]) -> None:
    """Make fairseq's binary data, unless it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    if "translation" in data:
        translation_data(folder, pairs=PAIRS, subwords=SUBWORDS)
    if "language_model" in data:
        language_model_data(folder, sotu, "--nwordssrc", str(WORDS))


def command_of(task: str, variant: str, seed: int, data: Path, save: Path, updates: int) -> Any:
    """``fairseq-train`` for one run; it goes on from its last checkpoint if there is one."""
    one = TASKS[task]
    arch = one.factored if variant.startswith("factored") else one.plain
    own = f"--max-update {updates} --seed {seed} --save-dir {save} --cpu --num-workers 0"
    common = (
        f"--data-buffer-size 0 --log-format json --log-interval {min(50, WINDOW)} "
        "--log-spectrum-interval 1 "
        f"--no-epoch-checkpoints --save-interval-updates {WINDOW} --keep-interval-updates 1 "
        "--distributed-world-size 1"
    )
    user_dir = str(Path(spectral_fairseq.__file__).resolve().parent)
    return [
        *(sys.executable, "-m", "fairseq_cli.train", str(data / one.data)),
        *("--user-dir", user_dir, *arch.split(), *one.flags.split()),
        *(*VARIANTS[variant].split(), *own.split(), *common.split()),
    ]


def train(task: str, variant: str, seed: int, work: Path, updates: int) -> None:
    """One run, unless it is finished; its folder keeps the log and the figures of its table."""
    folder = work / "runs" / task / f"{variant}-{seed}"
    if (folder / "table.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    command = command_of(task, variant, seed, work / "data", folder / "checkpoints", updates)
    env = {**KEEP_FREED_MEMORY, **os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = str(ROOT)
    with open(folder / "train.log", "a", encoding="utf-8") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"{folder}: exit status {done.returncode}, see {log.name}")
    figures = table_figures(folder / "checkpoints" / "checkpoint_last.pt")
    (folder / "table.json").write_text(json.dumps(figures), "utf-8")
    for checkpoint in (folder / "checkpoints").glob("*.pt"):
        checkpoint.unlink()


def result_of(folder: Path) -> Dict[str, Any]:
    """The figures of a finished run."""
    variant, _, seed = folder.name.rpartition("-")
    return {
        "task": folder.parent.name,
        "variant": variant,
        "seed": int(seed),
        "flags": VARIANTS[variant],
        "curve": curve(folder / "train.log"),
        **json.loads((folder / "table.json").read_text("utf-8")),
    }


def curve(log: Path) -> List[Dict[str, float]]:
    """Points of a training, :data:`WINDOW` updates apart.

    Each has the validation loss in bits, the table as it then was, and the mean training loss since
    the point before. The language models see no word of the corpus twice in a run, so theirs is a
    loss on new text, with dropout, and far less noisy than one validation under SGD.
    """
    losses: Dict[int, float] = {}
    points: Dict[int, Dict[str, float]] = {}
    for kind, record in log_records(log):
        if kind == "train_inner":
            losses[int(record["num_updates"])] = float(record["nll_loss"])
        elif kind == "valid" and int(record["valid_num_updates"]) % WINDOW == 0:
            points[int(record["valid_num_updates"])] = {
                "nll_bits": float(record["valid_nll_loss"]),
                "mean_cosine": float(record["valid_table_mean_cosine"]),
                "sigma_1": float(record["valid_table_sigma_max"]),
                "frobenius_norm": float(record["valid_table_frobenius_norm"]),
            }
    for update, point in points.items():
        point["update"] = update
        point["train_nll_bits"] = statistics.mean(
            loss for at, loss in losses.items() if update - WINDOW < at <= update
        )
    return [points[update] for update in sorted(points)]


def table_figures(checkpoint: Path) -> Dict[str, Any]:
    """Spectrum and mean cosine of the output table; of an SVD table what is stored, too."""
    state = load_checkpoint(checkpoint)
    # A plain table shared by fairseq's Transformer is saved under four names.
    shared = "decoder.output_projection.weight" in state["model"]
    wanted = "decoder.output_projection" if shared else None
    table = extract_table(state["model"], checkpoint, wanted)
    sigma, _ = right_singular_system(table.weight)
    rms = float(sigma.square().mean().sqrt())
    figures = {
        "mean_cosine": mean_cosine(table.weight),
        "sigma_1_to_rms": float(sigma[0]) / rms,
        "sigma_d_to_sigma_1": float(sigma[-1] / sigma[0]),
        "singular_values": [round(value, 5) for value in sigma.tolist()],
    }
    if table.kind == "svd":
        stored = table.stored_sigma
        assert stored is not None
        figures["stored_singular_values"] = [round(value, 5) for value in stored.tolist()]
        figures["largest_relative_error"] = float(((sigma - stored).abs() / stored).max())
        figures["relative_error_of_first"] = float((sigma[0] - stored[0]) / stored[0])
    return figures


def key_of(result: Dict[str, Any]) -> Tuple[str, str, int]:
    """Task, variant and seed of a run."""
    return result["task"], result["variant"], result["seed"]


def recorded(out: Optional[Path]) -> Dict[Tuple[str, str, int], Dict[str, Any]]:
    """The figures of the runs in a file, which need not be there."""
    lines = json.loads(out.read_text("utf-8")) if out and out.exists() else []
    return {key_of(one): one for one in lines}


def rows(results: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """A row for each task and variant: means over seeds, against plain with the same seeds.

    ``behind`` is how far the loss is above plain's at the end, ``most behind`` the most that it is
    at any point, each the mean over the seeds; ``spread`` is how far the seeds of the variant lie
    apart at the end.
    """
    found = []
    for task in TASKS:
        of_task = [one for one in results if one["task"] == task]
        plain = {one["seed"]: one["curve"] for one in of_task if one["variant"] == "plain"}
        for variant in VARIANTS:
            runs = [one for one in of_task if one["variant"] == variant]
            if not runs:
                continue
            row: Dict[str, Any] = {"task": task, "variant": variant, "seeds": len(runs)}
            for key, name in (("nll_bits", "valid"), ("train_nll_bits", "train")):
                last = [run["curve"][-1][key] for run in runs]
                behind = [
                    [a[key] - b[key] for a, b in zip(run["curve"], plain[run["seed"]])]
                    for run in runs
                    if run["seed"] in plain
                ]
                means = [statistics.mean(at) for at in zip(*behind)]
                row[name] = statistics.mean(last)
                row[f"{name} spread"] = max(last) - min(last)
                row[f"{name} behind"] = means[-1] if means else None
                row[f"{name} most behind"] = max(means, default=None)
            for key in ("mean_cosine", "sigma_1_to_rms", "sigma_d_to_sigma_1"):
                row[key] = statistics.mean(run[key] for run in runs)
            found.append(row)
    return found


def markdown(table: Sequence[Dict[str, Any]]) -> str:
    """The rows as a table."""
    head = list(table[0])
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in table:
        cells = [f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--work-dir", type=Path, default=Path("outputs/spectrum_study"))
    add("--sotu", type=Path, default=Path("sotu"), help="folder with train.tokens, valid.tokens")
    add("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    add("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="VARIANT")
    add("--seeds", nargs="+", type=int, default=[1, 2, 3])
    add("--updates", type=positive, help="of every run; each task's own number if unset")
    add("--at-once", type=positive, default=2)
    add("--out", type=Path, help="JSON with figures of runs: what it lacks is run and added to it")
    args = parser.parse_args()
    work = args.work_dir.resolve()
    results = recorded(args.out)
    prepare(work / "data", args.sotu.resolve(), {TASKS[task].data for task in args.tasks})
    due = [
        (task, variant, seed, work, args.updates or TASKS[task].updates)
        for seed in args.seeds
        for variant in args.variants
        for task in args.tasks
        if suits(task, variant) and (task, variant, seed) not in results
    ]
    torch.set_num_threads(1)
    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(lambda run: train(*run), due))
    for path in work.glob("runs/*/*/table.json"):
        one = result_of(path.parent)
        results[key_of(one)] = one
    found = [results[key] for key in sorted(results)]
    table = rows(found)
    print(markdown(table))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(one) for one in found)
        args.out.write_text(f"[\n{lines}\n]\n", "utf-8")
    print_result("spectrum_study", rows=table)


if __name__ == "__main__":
    main()
