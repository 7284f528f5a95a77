"""The optimiser under fairseq's own trainer: which parameters are tables, in every precision."""

import functools
from types import SimpleNamespace

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer
from omegaconf import OmegaConf
from torch import nn

from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.plugin.optimizers import (
    CoupledTables,
    couple_tables,
    table_parameters,
    two_numbers,
)
from tests.plugin.conftest import build_host_model, build_model

WORKING = {
    "fp32": (),
    "fp16": ("common.fp16=true", "common.fp16_no_flatten_grads=true"),
    "memory-efficient fp16": ("common.fp16=true", "common.memory_efficient_fp16=true"),
    "bf16": ("common.bf16=true",),
}


@functools.cache
def parsed():
    parser = options.get_training_parser()
    argv = ["no-data", "--arch", "transformer_lm", "--task", "language_modeling", "--cpu"]
    argv += ["--batch-size", "1", "--lr", "0.01", "--optimizer", "coupled_adam"]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, argv))


def trainer_of(model, *overrides):
    cfg = OmegaConf.merge(parsed(), OmegaConf.from_dotlist(list(overrides)))
    return Trainer(cfg, None, model, nn.Module())


def names_of(model, parameters):
    return {n for n, p in model.named_parameters() if any(p is one for one in parameters)}


@pytest.mark.slow
def test_tables_are_found(task):
    separate = build_host_model(task, "transformer", decoder_learned_pos=True)
    assert names_of(separate, table_parameters(separate)) == {
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "decoder.output_projection.weight",
    }
    shared = build_host_model(task, "transformer", share_all_embeddings=True)
    assert len(table_parameters(shared)) == 1
    for kind, name in (("svd", "U"), ("weight-norm", "v"), ("plain", "weight")):
        model = build_model(task, embedding_type=kind)
        assert names_of(model, table_parameters(model)) == {f"encoder.embed_tokens.{name}"}


@pytest.mark.parametrize("precision", WORKING)
def test_only_tables_are_coupled(task, precision):
    # SVD tables are refused in memory-efficient half precision.
    kind = "plain" if "memory-efficient" in precision else "svd"
    model = build_model(task, embedding_type=kind)
    trainer = trainer_of(model, *WORKING[precision])
    CoupledTables(trainer).begin_epoch(1)
    inner = trainer.optimizer.optimizer
    for group in inner.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    inner.step()
    moments = [state["exp_avg_sq"].shape for state in inner.state.values() if "exp_avg_sq" in state]
    rows = len(task.target_dictionary)
    assert moments.count((1, 16)) == 1 and not any(shape[:1] == (rows,) for shape in moments)


def test_flattened_parameters_are_refused_with_what_to_do(task):
    model = build_model(task)
    trainer = trainer_of(model)
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
    trainer.optimizer.optimizer.param_groups[:] = [{"params": [flat]}]
    with pytest.raises(UnsupportedError, match="--fp16-no-flatten-grads"):
        couple_tables(trainer.optimizer, model)


def test_a_group_of_a_composite_optimiser_is_refused(task):
    one = trainer_of(build_model(task)).optimizer
    trainer = SimpleNamespace(
        optimizer=SimpleNamespace(optimizer=SimpleNamespace(optimizers={"tables": one}))
    )
    with pytest.raises(UnsupportedError, match="composite"):
        CoupledTables(trainer).begin_epoch(1)


def test_a_sharded_one_is_refused(task):
    one = trainer_of(build_model(task)).optimizer.optimizer
    trainer = SimpleNamespace(optimizer=SimpleNamespace(optimizer=SimpleNamespace(optim=one)))
    with pytest.raises(UnsupportedError, match="--zero-sharding"):
        CoupledTables(trainer).begin_epoch(1)


def test_tables_are_named_once_however_often_an_epoch_begins(task):
    model = build_model(task)
    trainer = trainer_of(model)
    for _ in range(3):
        couple_tables(trainer.optimizer, model)
    tables = trainer.optimizer.optimizer._tables
    assert len(tables) == len({id(table) for table in tables})


@pytest.mark.parametrize("betas", ["0.9", "(0.9, 1.0)", "(0.9,", "os.getcwd()", (0.9,)])
def test_bad_betas_are_refused(betas):
    with pytest.raises(ConfigurationError, match="--adam-betas"):
        two_numbers(betas)
    assert two_numbers("(0.9, 0.98)") == (0.9, 0.98)


def test_the_clusters_of_fairseqs_adaptive_softmax_are_coupled(task):
    model = build_host_model(task, "transformer", adaptive_softmax_cutoff="20,30")
    assert names_of(model, table_parameters(model)) == {
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "decoder.adaptive_softmax.head.weight",
        "decoder.adaptive_softmax.tail.0.2.weight",
        "decoder.adaptive_softmax.tail.1.2.weight",
    }
