"""Muon under fairseq's own trainer: what it steps, in every precision."""

import contextlib
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.lm.muon import hidden_matrices_by_name
from spectral_fairseq.plugin.muon import (
    MuonMatrices,
    dictionaries_of,
    table_parameters,
    two_numbers,
)
from tests.capabilities import MUON
from tests.plugin.conftest import any_model, build_host_model, build_model, make_sample
from tests.plugin.trainers import ALL_PRECISIONS, PRECISIONS, build_trainer, take_updates


def names_of(model, parameters):
    return {n for n, p in model.named_parameters() if any(p is one for one in parameters)}


@pytest.mark.slow
def test_tables_are_found(task):
    separate = build_host_model(task, "transformer", decoder_learned_pos=True)
    tables = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    assert names_of(separate, table_parameters(separate)) == {
        *(*tables, "decoder.output_projection.weight"),
    }
    shared = build_host_model(task, "transformer", share_all_embeddings=True)
    assert len(table_parameters(shared)) == 1
    for kind, name in (("svd", "U"), ("weight-norm", "v"), ("plain", "weight")):
        model = build_model(task, embedding_type=kind)
        assert names_of(model, table_parameters(model)) == {f"encoder.embed_tokens.{name}"}
    clusters = build_host_model(task, "transformer", adaptive_softmax_cutoff="20,30")
    assert names_of(clusters, table_parameters(clusters)) == {
        *(*tables, "decoder.adaptive_softmax.head.weight"),
        *(f"decoder.adaptive_softmax.tail.{tail}.2.weight" for tail in (0, 1)),
    }


ROBERTA = {"untie_weights_roberta": True, "max_positions": 32, "tokens_per_sample": 32}
CONVOLUTIONS = {
    **{f"{side}_layers": "[(16, 3)] * 2" for side in ("encoder", "decoder")},
    **{f"max_{side}_positions": 32 for side in ("source", "target")},
}
ADAPTIVE = {
    **dict.fromkeys(("adaptive_input", "tie_adaptive_weights"), True),
    **dict.fromkeys(("adaptive_input_cutoff", "adaptive_softmax_cutoff"), "20,30"),
    **{"tokens_per_sample": 32, "decoder_input_dim": 16, "decoder_output_dim": 16},
}


@pytest.mark.parametrize("arch, options, name", [
    ("fconv", {**CONVOLUTIONS, "decoder_out_embed_dim": 16}, "decoder.fc3.weight_v"),
    ("roberta_base", ROBERTA, "encoder.lm_head.weight"),
])  # fmt: skip
def test_what_writes_words_is_no_hidden_matrix(task, arch, options, name):
    model = build_host_model(task, arch, **options)
    tables = table_parameters(model, dictionaries_of(task))
    assert name in names_of(model, tables)
    assert not names_of(model, tables) & set(hidden_matrices_by_name(model, tables))


def test_layers_for_ctc_and_vectors_of_clusters_are_no_hidden_matrices(task):
    words = len(task.target_dictionary)
    model = build_host_model(task, "transformer", share_all_embeddings=True)
    model.encoder.ctc_proj = nn.Linear(16, words)  # of speech to text
    speech = nn.ModuleDict({"proj": nn.Linear(16, words)})  # of wav2vec, without a dictionary
    for one, name in ((model, "encoder.ctc_proj.weight"), (speech, "proj.weight")):
        assert name in names_of(one, table_parameters(one, dictionaries_of(task)))
    tied, ours = build_model(task, "transformer_lm", **ADAPTIVE), any_model(task, "xl adaptive")
    for one, name in ((tied, "class_proj.weight"), (ours, "cluster_weight")):
        (clusters,) = (n for n, _ in one.named_parameters() if n.endswith(name))
        assert clusters in names_of(one, table_parameters(one))


@pytest.mark.parametrize("betas", ["0.9", "(0.9, 1.0)", "(0.9,", "os.getcwd()", (0.9,)])
def test_bad_betas_are_refused(betas):
    with pytest.raises(ConfigurationError, match="--adam-betas"):
        two_numbers(betas)
    assert two_numbers("(0.9, 0.98)") == (0.9, 0.98)


@MUON
def test_what_holds_no_whole_matrices_is_refused():
    trainer = build_trainer(optimizer="muon")
    one = trainer.optimizer
    parts = SimpleNamespace(optimizer=SimpleNamespace(optimizers={"tables": one}))
    shards = SimpleNamespace(optimizer=SimpleNamespace(optim=one.optimizer))
    for optimizer, found in ((parts, "composite"), (shards, "--zero-sharding")):
        with pytest.raises(UnsupportedError, match=f"optimizer muon.*{found}"):
            MuonMatrices(SimpleNamespace(optimizer=optimizer)).begin_epoch(1)
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    one.optimizer.param_groups[:] = [{"params": [flat]}]
    with pytest.raises(UnsupportedError, match="optimizer muon.*--fp16-no-flatten-grads"):
        MuonMatrices(trainer).begin_epoch(1)


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


@MUON
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
    take_updates(trainer, 2)
    found = stepped_by_muon(trainer)
    assert found == {
        name
        for name, one in before.items()
        if one.dim() == 2 and "embed" not in name and "output_projection" not in name
    }
    after = dict(trainer.get_model().named_parameters())
    assert not any(torch.equal(before[name], after[name]) for name in found)
    states = trainer.optimizer.optimizer.state.values()
    momenta = [state["momentum_buffer"] for state in states if "momentum_buffer" in state]
    assert all(one.dtype == torch.float32 for one in momenta)


@MUON
def test_factors_of_a_table_are_renewed():
    flags = {"name": "spectrum_control", "svd_interval": 1, "spectrum_weight": 0.1}
    trainer = build_trainer(optimizer="muon", table="svd", **flags)
    take_updates(trainer, 2)
    for gram in trainer.get_model().decoder.output_projection.table.grams():
        torch.testing.assert_close(gram, torch.eye(len(gram)), rtol=0, atol=1e-4)


@MUON
def test_no_step_is_taken_along_a_gradient_that_is_not_finite(monkeypatch):
    trainer = build_trainer(optimizer="muon")
    # What fairseq does after the crash: a checkpoint, and the batch once more.
    monkeypatch.setattr(trainer, "save_checkpoint", lambda *_: None)
    monkeypatch.setattr("fairseq.trainer.NanDetector", lambda _: contextlib.nullcontext())
    take_updates(trainer, 1)
    before = {name: one.clone() for name, one in trainer.get_model().state_dict().items()}
    weight = trainer.get_model().decoder.layers[0].fc1.weight
    hook = weight.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(FloatingPointError):
        trainer.train_step([make_sample(trainer.task)])
    hook.remove()
    for name, one in trainer.get_model().state_dict().items():
        assert torch.equal(one, before[name]), name


@MUON
@pytest.mark.parametrize("option, value", [("muon_momentum", 1.5), ("adam_betas", "(2, 3)")])
def test_flags_outside_their_range_are_named(option, value):
    with pytest.raises(ConfigurationError, match="--" + option.replace("_", "-")):
        build_trainer(f"optimizer.{option}={value}", optimizer="muon")


@MUON
@pytest.mark.slow
def test_the_command_line_trains(train):
    flags = ("--optimizer", "muon", "--weight-decay", "0.01")
    folder = train("transformer_wn", "regularized_cross_entropy", "--share-all-embeddings", *flags)
    log = (folder / "log.txt").read_text("utf-8")
    assert "Muon steps" in log and "Adam steps all other parameters" in log
