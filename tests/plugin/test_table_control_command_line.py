"""The decoupled control and the penalty on plain tables, through the real command line."""

import pytest
import torch

from spectral_fairseq.checkpoints.reading import load_checkpoint
from tests.conftest import PACKAGE, TINY_TRANSLATION
from tests.plugin.test_command_line import same_models

PLAIN = "regularized_cross_entropy"
SHARED = "--share-all-embeddings"
CONTROL = ("--spectrum-decay", "0.3", "--spectrum-decay-interval", "2", "--table-centering", "0.1")
FIXED = (*CONTROL, "--spectrum-side", "both", "--spectrum-scale", "fixed", "--spectrum-c2", "0.05")
XL = ("--task", "stateful_language_modeling", "--cpu", "--tokens-per-sample", "10")
XL += ("--batch-size", "3", "--batch-size-valid", "2", "--mem-len", "10")
XL += ("--decoder-embed-dim", "12", "--decoder-attention-heads", "2", "--decoder-layers", "1")
XL += ("--decoder-ffn-embed-dim", "20", "--adaptive-softmax-cutoff", "10,20,30")
XL += ("--lr-scheduler", "cosine", "--clip-norm", "0.25")


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


def model_of(folder):
    return load_checkpoint(folder / "checkpoint_last.pt")["model"]


@pytest.mark.parametrize(
    "arch, flags",
    [
        ("transformer", FIXED),
        ("transformer_sc", (*FIXED, "--embedding-type", "plain", "--optimizer", "adafactor")),
        ("transformer_sc", ("--svd-interval", "2", "--spectrum-weight", "0.1")),
    ],
)
def test_resumed_equals_uninterrupted(arch, flags, train):
    """In the middle of an epoch, with a prior that refers to the norm of the start."""
    run = (arch, PLAIN, SHARED, *flags)
    run += ("--max-epoch", 3)
    through = train(*run, "--max-update", 7)
    half = train(*run, "--max-update", 3)
    resumed = train(*run, "--max-update", 7, "--restore-file", half / "checkpoint_last.pt")
    assert not same_models(half, through)
    assert same_models(resumed, through)


def test_flags_of_the_prior_reach_criterion_and_arch(train):
    """The archs of this package and the criterions share their names on the command line."""
    for arch, defaults in (("transformer_sc", ("--embedding-type", "plain")), ("transformer", ())):
        folder = train(arch, PLAIN, SHARED, *FIXED, *defaults)
        cfg = load_checkpoint(folder / "checkpoint_last.pt")["cfg"]
        assert cfg["criterion"]["spectrum_c2"] == 0.05
        assert cfg["criterion"]["spectrum_prior"] == "exponential"
        assert cfg["criterion"]["spectrum_gamma"] is None
        if arch == "transformer_sc":
            assert cfg["model"]["spectrum_c2"] == 0.05


def test_zero_equals_fairseq_bit_for_bit(train):
    plain = train("transformer", "cross_entropy", SHARED)
    dense = ("--loss-form", "dense")
    zero = train("transformer", PLAIN, SHARED, "--spectrum-decay", "0", *dense)
    assert same_models(plain, zero)
    assert not same_models(plain, train("transformer", PLAIN, SHARED, *CONTROL))


@pytest.mark.parametrize(
    "arch, flags",
    [
        ("transformer", (*FIXED, "--spectrum-decay-interval", "1")),
        ("transformer_sc", ("--svd-interval", "1")),
    ],
)
def test_two_workers_equal_one_with_update_freq_two(
    arch, flags, run_on_two_workers, train, tiny_translation_data, tmp_path
):
    more = ("--batch-size", "6", "--max-tokens", "1000", "--max-update", "3", "--dropout", "0")
    more += ("--optimizer", "sgd", "--lr", "0.1", "--no-epoch-checkpoints", SHARED)
    more += flags
    one = train(arch, PLAIN, "--update-freq", "2", *more)
    two, watching = tmp_path / "two", tmp_path / "watching"
    watching.mkdir()
    (watching / "__init__.py").write_text(WATCHING)
    run_on_two_workers(
        *(tiny_translation_data, "--user-dir", watching, "--save-dir", two, "--arch", arch),
        *("--criterion", PLAIN, "--task", "translation", "--source-lang", "de"),
        *("--target-lang", "en", *TINY_TRANSLATION, "--seed", "1", "--max-epoch", "1", *more),
    )
    first, second = model_of(one), model_of(two)
    for key in first:
        torch.testing.assert_close(first[key], second[key], rtol=1e-5, atol=1e-6)
    after_each_update = [(watching / f"{rank}.txt").read_text().split() for rank in (0, 1)]
    assert after_each_update[0] == after_each_update[1] and len(set(after_each_update[0])) == 3


@pytest.mark.parametrize(
    "more", [("--memory-efficient-fp16", "--fp16"), ("--fp16", "--fp16-no-flatten-grads")]
)
def test_half_precision_on_a_cpu(more, train):
    folder = train("transformer", PLAIN, SHARED, *CONTROL, "--cpu", *more)
    assert all(torch.isfinite(value).all() for value in model_of(folder).values())


@pytest.mark.parametrize("flags", [CONTROL, ("--spectrum-weight", "0.1")])
def test_a_transformer_xl_with_an_adaptive_softmax(flags, train):
    arch = "transformer_xl_wt103_small"
    folder = train(arch, PLAIN, *XL, *flags, "--log-spectrum-interval", "1")
    plain = train(arch, PLAIN, *XL, "--log-spectrum-interval", "1")
    assert not same_models(folder, plain)
    log = (folder / "log.txt").read_text("utf-8")
    assert ("| spectrum " in log) is (flags != CONTROL)


def test_an_untied_language_model_controls_its_output_table_alone(train):
    flags = (PLAIN, "--max-update", "2", "--lr", "0")
    plain = model_of(train("transformer_lm", *flags))
    control = model_of(train("transformer_lm", *flags, *FIXED, "--spectrum-decay-interval", "1"))
    changed = [key for key in plain if not torch.equal(plain[key], control[key])]
    assert changed == []  # a rate of zero changes nothing at all
    flags = (*flags[:-1], "1e-9")
    control = model_of(train("transformer_lm", *flags, *FIXED, "--spectrum-decay-interval", "1"))
    moved = [k for k in plain if not torch.allclose(plain[k], control[k], rtol=0, atol=1e-6)]
    assert moved == ["decoder.output_projection.weight"]


def test_bad_input_stops_before_training(run_cli, tiny_translation_data, tmp_path):
    done = run_cli(
        *("fairseq-train", tiny_translation_data, "--user-dir", PACKAGE, "--save-dir", tmp_path),
        *("--arch", "transformer", "--criterion", PLAIN, SHARED),
        *("--encoder-embed-dim", "64", "--decoder-embed-dim", "64", "--max-update", "2"),
        *("--optimizer", "adam", "--lr", "0.001", "--max-tokens", "96", *CONTROL),
        rc=None,
    )
    assert done.returncode != 0 and "N >= d" in done.stderr
    assert not list(tmp_path.glob("*.pt"))
