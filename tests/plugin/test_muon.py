"""The optimiser under fairseq's own trainer: which matrices it takes, in every precision."""

import contextlib
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.plugin.optimizers import MuonMatrices
from tests.plugin.trainers import (
    ALL_PRECISIONS,
    HALF,
    PRECISIONS,
    build_trainer,
    make_sample,
    same_models,
    save_in_epoch,
)
from tests.plugin.trainers import (
    train as step,
)

pytestmark = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="this torch has no Muon: 2.9 or newer has"
)


def stepped_by_muon(trainer):
    """Names of the parameters with a momentum of Muon."""
    optimizer = trainer.optimizer
    copies = getattr(optimizer, "fp32_params", None)
    named = list(trainer.get_model().named_parameters())
    stepped = {id(one): one for _, one in named}
    if copies is not None:
        stepped = {id(half): copy for half, copy in zip(optimizer.fp16_params, copies)}
    states = {name: optimizer.optimizer.state.get(stepped[id(one)], {}) for name, one in named}
    return {name for name, state in states.items() if "momentum_buffer" in state}


@pytest.mark.parametrize("table", ["plain", "svd", "weight-norm"])
@pytest.mark.parametrize("precision", ALL_PRECISIONS)
def test_muon_steps_hidden_matrices_alone(precision, table, caplog):
    if "memory" in precision and table != "plain":
        pytest.skip("refused: half precision rounds its steps to nothing")
    with caplog.at_level(logging.INFO):
        trainer = build_trainer(*PRECISIONS[precision], optimizer="muon", table=table)
    assert caplog.text.count("Muon steps") == 1
    assert "encoder.layers.*.self_attn.k_proj.weight (1)" in caplog.text
    before = {n: p.detach().clone() for n, p in trainer.get_model().named_parameters()}
    step(trainer, 2)
    found = stepped_by_muon(trainer)
    assert found == {
        name
        for name, one in before.items()
        if one.dim() == 2 and "embed" not in name and "output_projection" not in name
    }
    assert not any(
        torch.equal(before[n], p) for n, p in trainer.get_model().named_parameters() if n in found
    )
    states = trainer.optimizer.optimizer.state.values()
    assert all(
        state["momentum_buffer"].dtype == torch.float32
        for state in states
        if "momentum_buffer" in state
    )


def test_tables_are_coupled_where_that_is_asked_for():
    for tables, rows in (("adam", 56), ("coupled_adam", 1)):
        trainer = build_trainer(f"optimizer.muon_tables={tables}", optimizer="muon")
        step(trainer, 1)
        table = trainer.get_model().decoder.embed_tokens.weight
        assert len(trainer.optimizer.optimizer.state[table]["exp_avg_sq"]) == rows


# fairseq's checkpoints hold 16 bits of the float32 copies of --fp16 and --bf16.
@pytest.mark.parametrize("precision", ["float32", HALF])
def test_a_resumed_training_equals_an_uninterrupted_one(precision, tmp_path):
    overrides = (*PRECISIONS[precision], "criterion.table_lr_scale=2")
    first = build_trainer(*overrides, optimizer="muon")
    step(first, 3)
    save_in_epoch(first, tmp_path / "half.pt", 3)
    second = build_trainer(*overrides, optimizer="muon", begin=False)
    second.load_checkpoint(str(tmp_path / "half.pt"))
    second.begin_epoch(1)
    step(first, 2)
    step(second, 2)
    assert same_models(first, second)


def test_factors_of_a_table_are_renewed(tmp_path):
    flags = {"name": "spectrum_control", "svd_interval": 1, "spectrum_weight": 0.1}
    trainer = build_trainer(optimizer="muon", table="svd", **flags)
    step(trainer, 2)
    for gram in trainer.get_model().decoder.output_projection.table.grams():
        torch.testing.assert_close(gram, torch.eye(len(gram)), rtol=0, atol=1e-4)


def test_no_step_is_taken_along_a_gradient_that_is_not_finite(monkeypatch):
    trainer = build_trainer(optimizer="muon")
    # What fairseq does after the crash: a checkpoint, and the batch once more.
    monkeypatch.setattr(trainer, "save_checkpoint", lambda *_: None)
    monkeypatch.setattr("fairseq.trainer.NanDetector", lambda _: contextlib.nullcontext())
    step(trainer, 1)
    before = {name: one.clone() for name, one in trainer.get_model().state_dict().items()}
    weight = trainer.get_model().decoder.layers[0].fc1.weight
    hook = weight.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(FloatingPointError):
        trainer.train_step([make_sample(trainer.task)])
    hook.remove()
    for name, one in trainer.get_model().state_dict().items():
        assert torch.equal(one, before[name]), name


def test_what_holds_no_whole_matrices_is_refused():
    trainer = build_trainer(optimizer="muon")
    one = trainer.optimizer
    flat = nn.Parameter(torch.zeros(9))
    parts = SimpleNamespace(optimizer=SimpleNamespace(optimizers={"hidden": one}))
    shards = SimpleNamespace(optimizer=SimpleNamespace(optim=one.optimizer))
    for optimizer, found in ((parts, "composite"), (shards, "--zero-sharding")):
        with pytest.raises(UnsupportedError, match=f"optimizer muon.*{found}"):
            MuonMatrices(SimpleNamespace(optimizer=optimizer)).begin_epoch(1)
    one.optimizer.param_groups[:] = [{"params": [flat]}]
    with pytest.raises(UnsupportedError, match="optimizer muon.*--fp16-no-flatten-grads"):
        MuonMatrices(trainer).begin_epoch(1)


@pytest.mark.parametrize("option, value", [("muon_momentum", 1.5), ("adam_betas", "(2, 3)")])
def test_flags_outside_their_range_are_named(option, value):
    with pytest.raises(ConfigurationError, match="--" + option.replace("_", "-")):
        build_trainer(f"optimizer.{option}={value}", optimizer="muon")


@pytest.mark.slow
def test_the_command_line_trains_and_goes_on(train):
    flags = ("--optimizer", "muon", "--muon-tables", "coupled_adam", "--weight-decay", "0.01")
    flags += ("--table-lr-scale", "2", "--table-weight-decay", "0.1", "--share-all-embeddings")
    folder = train("transformer_wn", "regularized_cross_entropy", *flags)
    log = (folder / "log.txt").read_text("utf-8")
    assert "Muon steps" in log and "couples the second moments" in log
    assert "trained at 2 times the learning rate, with a weight decay of 0.1" in log
    more = ("--max-epoch", "2", "--max-update", "8")
    whole = train("transformer_wn", "regularized_cross_entropy", *flags, *more)
    path = folder / "checkpoint_last.pt"
    again = train(
        "transformer_wn", "regularized_cross_entropy", *flags, *more, "--restore-file", path
    )
    one, two = (load_checkpoint(one / "checkpoint_last.pt")["model"] for one in (whole, again))
    assert all(torch.equal(one[name], two[name]) for name in one)
