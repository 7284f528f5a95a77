"""Trainers of fairseq with a tiny Transformer, whose batches are handed to them one by one."""

import functools

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.optim import FP16Optimizer
from fairseq.optim.adam import FairseqAdam
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer
from omegaconf import OmegaConf
from torch import nn

from spectral_fairseq.compat.dead_encoder_keys import DEAD
from spectral_fairseq.plugin.find import output_matrix
from tests.capabilities import HALF_ON_CPU
from tests.plugin.conftest import build_criterion, build_model, make_sample, words

PLAIN = {"name": "regularized_cross_entropy"}
NT_ASGD = ("--optimizer", "nt_asgd", "--lr-scheduler", "nt_asgd", "--lr", "0.5")
OPTIMIZERS = {
    "sgd": ("--optimizer", "sgd", "--lr", "0.5"),
    "averaged sgd": NT_ASGD,
    "adam": ("--optimizer", "adam", "--lr", "0.02"),
    "muon": ("--optimizer", "muon", "--lr", "0.02"),
    "adafactor": ("--optimizer", "adafactor", "--lr", "0.02"),
}
# Further ones, whose state is carried over to other factors of a table.
STATES = {
    "sgd with momentum": ("--optimizer", "sgd", "--lr", "0.5", "--momentum", "0.9"),
    "nag": ("--optimizer", "nag", "--lr", "0.1", "--momentum", "0.9"),
    "adagrad": ("--optimizer", "adagrad", "--lr", "0.05"),
    "adafactor with a mean": ("--optimizer", "adafactor", "--beta1", "0.9", "--lr", "0.02"),
}
PRECISIONS = {
    "float32": (),
    "fp16": ("common.fp16=true", "common.fp16_no_flatten_grads=true"),
    "memory-efficient fp16": ("common.fp16=true", "common.memory_efficient_fp16=true"),
    "bf16": ("common.bf16=true",),
}
# Tensors of fairseq 0.12.2 that training does not use; the last one is never even set.
UNUSED = {*DEAD, "_float_tensor"}
ALL_PRECISIONS = [
    pytest.param(name, marks=HALF_ON_CPU if "fp16" in name else ()) for name in PRECISIONS
]


class Task(FairseqTask):
    """A task whose batches are handed to the trainer directly."""

    def __init__(self, dictionary):
        super().__init__(None)
        self.source_dictionary_ = dictionary

    source_dictionary = property(lambda self: self.source_dictionary_)
    target_dictionary = property(lambda self: self.source_dictionary_)


@functools.cache
def parsed(*flags):
    parser = options.get_training_parser()
    argv = ["no-data", "--arch", "transformer_lm", "--task", "language_modeling", "--cpu"]
    argv += ["--batch-size", "1", "--criterion", "mle_cosreg", *flags]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, argv))


def build_trainer(
    *overrides, optimizer="adam", arch="transformer_sc", table="plain", begin=True, **criterion
):
    """A trainer of a tiny Transformer with a shared table of some kind, in its first epoch.

    fairseq loads a checkpoint before the epoch begins: with ``begin=False`` it has not begun.
    """
    flags = parsed(*{**OPTIMIZERS, **STATES}[optimizer])
    cfg = OmegaConf.merge(flags, OmegaConf.from_dotlist(list(overrides)))
    task = Task(words())
    model = build_model(task, arch, embedding_type=table)
    trainer = Trainer(cfg, task, model, build_criterion(task, **{**PLAIN, **criterion}))
    trainer.reset_dummy_batch(make_sample(task))
    if begin:
        trainer.begin_epoch(1)
    return trainer


def take_updates(trainer, updates):
    for _ in range(updates):
        seed = trainer.get_num_updates()
        trainer.train_step([make_sample(trainer.task, seed=seed)])


def save_in_epoch(trainer, path, done, epoch=1, val_loss=None):
    """Save after ``done`` updates of an epoch, as fairseq does; 0 at the end of the one before."""
    iterator = {"version": 2, "epoch": epoch, "iterations_in_epoch": done, "shuffle": True}
    trainer.consolidate_optimizer()
    trainer.save_checkpoint(str(path), {"train_iterator": iterator, "val_loss": val_loss})


def resumed_from(trainer, build, path, done):
    """A trainer that goes on from what ``trainer`` saves after ``done`` updates of its epoch."""
    save_in_epoch(trainer, path, done)
    resumed = build(begin=False)
    resumed.load_checkpoint(str(path))
    resumed.begin_epoch(1)
    return resumed


def same_states(first, second):
    """Whether two state dicts hold the same numbers, as far as training uses them."""
    used = [key for key in first if key.rpartition(".")[2] not in UNUSED]
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in used)


def same_models(first, second):
    """:func:`same_states` of the models of two trainers."""
    return same_states(first.get_model().state_dict(), second.get_model().state_dict())


def output_table(trainer):
    """The output table of a trainer's model, without a gradient."""
    return output_matrix(trainer.get_model(), len(trainer.task.target_dictionary)).detach()


def excluded_rows(trainer):
    """Rows of the output table that the criterion does not count."""
    return trainer.get_criterion().objective_of(trainer.get_model()).parts.words.excluded.tolist()


def counted(trainer):
    """The other rows, in float64."""
    weight, excluded = output_table(trainer).double(), excluded_rows(trainer)
    return weight[[i for i in range(len(weight)) if i not in excluded]]


def flattened_fp16(kind=FairseqAdam, name="adam", *overrides):
    """What --fp16 does on a GPU: (optimiser, its parameters, the tensor that holds them all)."""
    overrides = OmegaConf.from_dotlist(["common.fp16=true", *overrides])
    cfg = OmegaConf.merge(parsed(*OPTIMIZERS[name]), overrides)
    params = [nn.Parameter(torch.randn(shape).half()) for shape in ((3,), (20, 4), (5,))]
    flat = nn.Parameter(torch.cat([p.detach().float().view(-1) for p in params]))
    flat.grad = torch.zeros_like(flat)
    # The key is the device's number, which a CPU does not have.
    optimizer = FP16Optimizer(cfg, params, kind(cfg.optimizer, [flat]), {None: flat})
    return optimizer, params, flat
