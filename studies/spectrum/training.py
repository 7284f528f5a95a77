"""One training, and its figures from fairseq's log and the checkpoint."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Dict, List, Sequence

from benchmarks.harness import commit
from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.embeddings.entries import PADDING_ROW
from spectral_fairseq.formats.stored import Stored
from spectral_fairseq.formats.table import read_table
from spectral_fairseq.formats.which_table import choose
from spectral_fairseq.functional.cosines import mean_cosine
from spectral_fairseq.functional.gram import table_gram
from spectral_fairseq.functional.spectra import right_singular_system_of_gram
from spectral_fairseq.provenance import versions
from studies.spectrum.grid import TASKS, VARIANTS, Key
from studies.training import TrainingRun
from studies.training_data import language_model_data, translation_data
from studies.training_log import log_records
from studies.translation import USER_DIR
from studies.work_folder import WorkDir

PAIRS, SUBWORDS, WORDS = 10_000, 2_000, 4_000
WINDOW = 300  # updates between two points of a curve


def prepare(folder: Path, sotu: Path, data: Sequence[str]) -> None:
    """Make fairseq's binary data, unless it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    if "translation" in data:
        translation_data(folder, pairs=PAIRS, subwords=SUBWORDS)
    if "language_model" in data:
        language_model_data(folder, sotu, "--nwordssrc", str(WORDS))


def flags_of(task: str, variant: str, seed: int, updates: int) -> List[str]:
    """Flags of ``fairseq-train`` for one run; it goes on from its last checkpoint."""
    one = TASKS[task]
    arch = one.factored if variant.startswith("factored") else one.plain
    own = f"--max-update {updates} --seed {seed} --cpu --num-workers 0"
    common = (
        f"--data-buffer-size 0 --log-format json --log-interval {min(50, WINDOW)} "
        "--log-spectrum-interval 1 "
        f"--no-epoch-checkpoints --save-interval-updates {WINDOW} --keep-interval-updates 1 "
        "--distributed-world-size 1"
    )
    parts = (arch, one.flags, VARIANTS[variant], own, common)
    return [flag for part in parts for flag in part.split()]


class SpectrumRun(TrainingRun):
    """One training in a folder of its own.

    Args:
        key: task, variant and seed.
        work: the work folder, with ``data/``.
        updates: after which it ends.
    """

    def __init__(self, key: Key, work: WorkDir, updates: int) -> None:
        self.task, self.variant, self.seed = key
        folder = work.root / "runs" / self.task / f"{self.variant}-{self.seed}"
        binary, flags = work.root / "data" / TASKS[self.task].data, flags_of(*key, updates)
        command = ["fairseq-train", str(binary), "--user-dir", USER_DIR, *flags]
        command += ["--save-dir", str(folder / "checkpoints")]
        label = f"{self.task} {self.variant} {self.seed}"
        super().__init__(label, work, folder, command, binary, updates, updates, flags)

    def is_trained(self) -> bool:
        """Whether its last checkpoint is that of the last update; once recorded it has none."""
        return self._ended_unseen()

    def record(self) -> Dict[str, Any]:
        """Its curve and the figures of its table."""
        return {
            "task": self.task,
            "variant": self.variant,
            "seed": self.seed,
            "flags": VARIANTS[self.variant],
            "curve": curve(self.log),
            **table_figures(self.folder / "checkpoints" / "checkpoint_last.pt"),
            "versions": {**versions(), "commit": commit()},
            "updates": self.updates,
        }

    def remove_checkpoints(self) -> None:
        """Remove what is not needed once the training is recorded."""
        for checkpoint in (self.folder / "checkpoints").glob("*.pt"):
            checkpoint.unlink()


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
    model = Stored(str(checkpoint), state["model"])
    table = read_table(choose(model, wanted), [PADDING_ROW])
    gram = table_gram(table.weight)
    sigma, _ = right_singular_system_of_gram(gram, len(table.weight))
    rms = float(sigma.square().mean().sqrt())
    figures = {
        "mean_cosine": mean_cosine(table.weight),
        "sigma_1_to_rms": float(sigma[0]) / rms,
        "sigma_d_to_sigma_1": float(sigma[-1] / sigma[0]),
        "singular_values": [float(f"{value:.4g}") for value in sigma.tolist()],
    }
    if table.kind == "svd":
        stored = table.stored_sigma
        assert stored is not None
        figures["largest_relative_error"] = float(((sigma - stored).abs() / stored).max())
        figures["relative_error_of_first"] = float((sigma[0] - stored[0]) / stored[0])
    return figures
