"""A resumed run equals an uninterrupted one, bit for bit, and two workers equal one."""

import functools

import pytest
import torch

from spectral_fairseq.checkpoints.reading import load_checkpoint
from tests.capabilities import HALF_ON_CPU, MUON
from tests.conftest import train_command
from tests.plugin.trainers import (
    PRECISIONS,
    build_trainer,
    resumed_from,
    same_states,
    save_in_epoch,
    take_updates,
)

CRITERION, SHARED = "regularized_cross_entropy", "--share-all-embeddings"
SMOOTHED = (CRITERION, SHARED, "--label-smoothing", "0.1")
SGD = ("--optimizer", "sgd", "--lr", "0.1")
CONTROL = ("--spectrum-decay", "0.3", "--spectrum-decay-interval", "2", "--table-centering", "0.1")
# With a prior that refers to the norm of the start.
FIXED = (*CONTROL, "--spectrum-side", "both", "--spectrum-scale", "fixed", "--spectrum-c2", "0.05")
# Of a table that is off its constraint set.
FACTORS = ("--orthogonality-weights", "0.1,0.1,0.1,0.1", "--spectrum-weight", "0.1")
RESUMED = {
    "penalties on factors": ("transformer_sc", "spectrum_control", SHARED, *FACTORS),
    "R-Drop": ("transformer", *SMOOTHED, "--rdrop-weight", "3"),
    "fast dropout": ("transformer", CRITERION, SHARED, "--fast-dropout", "--dropout", "0.3"),
}
ALL = (*FACTORS, "--cosreg-weight", "1", "--weight-norm-weight", "0.1", *SGD)
# Arguments of a training of three updates, or of six; the tolerance of its weights
SHORT, LONG = ("--max-update", "3"), ("--max-epoch", "2", "--max-update", "6")
TWO_WORKERS = {
    "every penalty": (("transformer_sc", "spectrum_control", SHARED, *ALL, *SHORT), 1e-6),
    "decoupled control": (
        ("transformer", CRITERION, SHARED, *FIXED, "--spectrum-decay-interval", "1", *SGD, *SHORT),
        1e-6,
    ),
    "renewed factors": (
        ("transformer_sc", CRITERION, SHARED, "--svd-interval", "1", *SGD, *SHORT),
        1e-6,
    ),
}
# A plugin that writes down, after each update, what each worker's model is.
WATCHING = """
import hashlib
from pathlib import Path
import spectral_fairseq.plugin
from fairseq.trainer import Trainer

train_step = Trainer.train_step

def watched(self, *args, **kwargs):
    result = train_step(self, *args, **kwargs)
    parts = [one.detach().numpy().tobytes() for one in self.get_model().parameters()]
    with open(Path(__file__).with_name(f"{self.data_parallel_rank}.txt"), "a") as file:
        file.write(hashlib.sha256(b"".join(parts)).hexdigest() + "\\n")
    return result

Trainer.train_step = watched
"""


def weights_of(path):
    """The model of a checkpoint, or of the last one in a folder."""
    path = path / "checkpoint_last.pt" if path.is_dir() else path
    return load_checkpoint(path)["model"]


def same_trainings(first, second):
    return same_states(weights_of(first), weights_of(second))


# Arguments of build_trainer; the prior of the control refers to the norm of the start.
WAYS = {
    "likelihood": {},
    "factors": {"table": "svd", "name": "spectrum_control", "svd_interval": 2},
    "weight norm": {"table": "weight-norm"},
    "spectral norm": {"table": "spectral-norm"},
    "mixture of softmaxes": {"arch": "transformer_mos"},
    "cosine regularisation": {"name": "mle_cosreg"},
    "R-Drop": {"rdrop_weight": 1.0},
    "decoupled control": {"spectrum_decay": 0.2, "spectrum_decay_interval": 2,
                          "spectrum_side": "both", "spectrum_scale": "fixed"},
    "averages": {"optimizer": "averaged sgd"},
    "adafactor": {"optimizer": "adafactor"},
    "Muon": {"optimizer": "muon"},
}  # fmt: skip
IN_EVERY_PRECISION = ("decoupled control", "Muon")


def cases():
    """All in bfloat16, which has all that float32 has, and rounds."""
    for way in WAYS:
        for precision in PRECISIONS if way in IN_EVERY_PRECISION else ("bf16",):
            marks = [MUON] if way == "Muon" else []
            marks += [HALF_ON_CPU] if "fp16" in precision else []
            yield pytest.param(way, precision, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("way, precision", cases())
def test_a_training_resumes_bit_for_bit(way, precision, tmp_path):
    build = functools.partial(build_trainer, *PRECISIONS[precision], **WAYS[way])
    through, half = build(), build()
    take_updates(through, 5)
    take_updates(half, 3)
    resumed = resumed_from(half, build, tmp_path / "c.pt", done=3)
    take_updates(resumed, 2)
    for trainer, name in ((through, "through.pt"), (resumed, "resumed.pt")):
        save_in_epoch(trainer, tmp_path / name, done=5)
    saved, again = (weights_of(tmp_path / name) for name in ("through.pt", "resumed.pt"))
    assert same_states(saved, again)  # the float32 weights, of which the model's are roundings
    table = saved["decoder.output_projection.weight"] if way == "likelihood" else None
    assert table is None or not torch.equal(table, table.bfloat16().float())


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_equals_uninterrupted(name, train):
    """In the middle of an epoch."""
    run = (*RESUMED[name], "--max-epoch", "3", "--cpu")
    through = train(*run, "--max-update", 7)
    half = train(*run, "--max-update", 3)
    resumed = train(*run, "--max-update", 7, "--restore-file", half / "checkpoint_last.pt")
    assert not same_trainings(half, through)
    assert same_trainings(resumed, through)


@pytest.mark.parametrize("name", TWO_WORKERS)
def test_two_workers_equal_one_with_update_freq_two(
    name, run_on_two_workers, train, tiny_translation_data, tmp_path
):
    (arch, *flags), tolerance = TWO_WORKERS[name]
    more = ("--batch-size", "6", "--max-tokens", "1000", "--dropout", "0", "--no-epoch-checkpoints")
    one = train(arch, *flags, "--update-freq", "2", *more)
    two, watching = tmp_path / "two", tmp_path / "watching"
    watching.mkdir()
    (watching / "__init__.py").write_text(WATCHING)
    more = (*flags, *more, "--user-dir", watching)
    run_on_two_workers(*train_command(tiny_translation_data, two, arch, *more))
    first, second = weights_of(one), weights_of(two)
    for key in first:
        torch.testing.assert_close(first[key], second[key], rtol=10 * tolerance, atol=tolerance)
    after_each_update = [(watching / f"{rank}.txt").read_text().split() for rank in (0, 1)]
    assert after_each_update[0] == after_each_update[1]
    updates = int(flags[flags.index("--max-update") + 1])
    assert len(set(after_each_update[0])) == updates
