"""Patches of how a training goes on: each defect in fairseq as installed, and its absence."""

from types import SimpleNamespace

import pytest
import torch

from spectral_fairseq.compat.resuming import (
    CURRICULUM,
    float32_copies,
    restoring_float32,
    saving_float32,
    view_for,
)
from tests.capabilities import HALF_LAYERS_ON_CPU, LOAD_ANYTHING
from tests.compat.conftest import train_arguments
from tests.compat.fairseq_process import Fails
from tests.plugin.trainers import flattened_fp16, same_states


@pytest.fixture(params=["bare", "patched"])
def which(request):
    """The name of a process, for tests that do the same in both."""
    return request.param


@pytest.fixture
def process(which, request):
    return request.getfixturevalue(which)


# Patience


def test_a_resumed_training_stops_when_it_would_have(which, process, data, tmp_path, monkeypatch):
    """With a rate of 0 the first validation is the best: a patience of 2 ends the third epoch."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # or the bare one cannot resume
    for epochs in ("2", "9"):
        more = ("--lr", "0", "--patience", "2", "--max-epoch", epochs)
        process.cli("fairseq_cli.train", *train_arguments(data, tmp_path, *more))
    last = {"bare": 5, "patched": 3}[which]
    assert (tmp_path / f"checkpoint{last}.pt").exists()
    assert not (tmp_path / f"checkpoint{last + 1}.pt").exists()


# Position in the data


BATCHES = 17


def taken_and_left(before, after, taken, batches):
    """Batches that some workers take, and those that others take after a resume."""
    import torch
    from fairseq.data.iterators import EpochBatchIterator

    data = torch.utils.data.TensorDataset(torch.arange(batches))

    def iterators(workers):
        return [
            EpochBatchIterator(
                dataset=data,
                collate_fn=lambda batch: [int(index) for (index,) in batch],
                batch_sampler=[[index] for index in range(batches)],
                num_shards=workers,
                shard_id=worker,
            )
            for worker in range(workers)
        ]

    first, states = [], []
    for iterator in iterators(before):
        epoch = iterator.next_epoch_itr(shuffle=True)
        first += [index for _ in range(taken) for index in next(epoch)]
        states.append(iterator.state_dict())
    second = []
    for iterator in iterators(after):
        iterator.load_state_dict(states[0])
        second += [index for batch in iterator.next_epoch_itr(shuffle=True) for index in batch]
    return [sorted(first), sorted(second)]


@pytest.mark.parametrize("before, after, taken, twice", [
    (2, 1, 4, 0), (1, 2, 4, 0), (1, 2, 16, 0), (4, 2, 3, 0), (3, 2, 3, 1),
])  # fmt: skip
def test_every_batch_is_taken_once(before, after, taken, twice, patched):
    """Or some twice, where the number of workers does not divide what was taken."""
    call = {"before": before, "after": after, "taken": taken, "batches": BATCHES}
    first, second = patched.call(taken_and_left, **call)
    assert len(first) == before * taken and set(first + second) == set(range(BATCHES))
    assert len(first + second) == BATCHES + twice


def test_fairseq_alone_repeats_batches_or_fails(bare):
    first, second = bare.call(taken_and_left, before=2, after=1, taken=4, batches=BATCHES)
    assert len(first + second) == BATCHES + 4
    fails = Fails("dataloader mismatch")
    bare.gives(fails, taken_and_left, before=1, after=2, taken=12, batches=BATCHES)


def restored(**saved):
    import torch
    from fairseq.data.iterators import EpochBatchIterator

    batches = [[index] for index in range(9)]
    data = torch.utils.data.TensorDataset(torch.arange(9))
    iterator = EpochBatchIterator(data, list, batches, num_shards=1)
    iterator.load_state_dict({"version": 2, "epoch": 1, "iterations_in_epoch": 5, **saved})
    return iterator.iterations_in_epoch


@pytest.mark.parametrize("saved", [{"num_shards": None}, {}])
def test_the_number_of_workers_is_not_needed(saved, patched):
    """Checkpoints of unpatched runs have none, and some hold None."""
    patched.gives(5, restored, **saved)


# Composition of the batches


def batches(epoch, reused, seed_by_epoch=True):
    """The batches of a training that begins in an epoch, and what it knows of that epoch."""
    import argparse

    import numpy as np
    import torch
    from fairseq.data import Dictionary, LanguagePairDataset
    from fairseq.tasks import LegacyFairseqTask

    class Sentences(LanguagePairDataset):
        can_reuse_epoch_itr_across_epochs = reused

        def set_epoch(self, epoch):
            self.epoch = epoch

    sentences = Sentences([torch.tensor([4, 2])] * 30, np.full(30, 2), Dictionary())
    task = LegacyFairseqTask(argparse.Namespace())
    task._seed_follows_epoch = seed_by_epoch  # as the patched Trainer.get_train_iterator does
    seed = 1 + epoch * seed_by_epoch
    iterator = task.get_batch_iterator(sentences, max_sentences=4, seed=seed, epoch=epoch)
    composed = [[int(index) for index in batch] for batch in iterator.frozen_batches]
    assert task.get_batch_iterator(sentences, max_sentences=4, seed=1, epoch=9) is iterator or (
        not reused
    )
    return [composed, iterator.epoch, sentences.epoch]


@pytest.mark.parametrize("which, reused, by_epoch, same", [
    ("patched", True, False, True),
    ("patched", True, True, True),
    ("patched", False, True, False),  # datasets that change from epoch to epoch
    ("bare", True, True, False),
])  # fmt: skip
def test_a_resumed_run_composes_the_batches_of_the_uninterrupted_one(
    process, reused, by_epoch, same
):
    first, *_ = process.call(batches, epoch=1, reused=reused, seed_by_epoch=by_epoch)
    later, *epochs = process.call(batches, epoch=3, reused=reused, seed_by_epoch=by_epoch)
    assert (first == later) is same
    assert not same or epochs == [3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--curriculum 2", "--update-ordered-indices-seed"])
def test_a_translation_resumed_in_its_third_epoch(more, train):
    """Bit for bit, from the middle of an epoch."""
    import torch
    from fairseq.dataclass.configs import DatasetConfig

    if more and not hasattr(DatasetConfig, more.split()[0][2:].replace("-", "_")):
        pytest.skip("this fairseq has no such flag")
    flags = (
        *more.split(),
        *("--max-epoch", "3", "--max-update", "0", "--max-tokens", "40"),
        *("--no-epoch-checkpoints", "--save-interval-updates", "1"),
        *("--keep-interval-updates", "100"),
    )
    folder = train("transformer_sc", "spectrum_control", *flags)
    saved = sorted(folder.glob("checkpoint_3_*.pt"))
    through = torch.load(folder / "checkpoint_last.pt", **LOAD_ANYTHING)["model"]
    resumed = train("transformer_sc", "spectrum_control", *flags, "--restore-file", str(saved[0]))
    again = torch.load(resumed / "checkpoint_last.pt", **LOAD_ANYTHING)["model"]
    assert same_states(through, again)


# Curriculum, several trainings, validation on training data


def orders():
    """The order of eight batches in four epochs, of which the last two are shuffled."""
    import inspect

    import torch
    from fairseq.data.iterators import EpochBatchIterator

    known = inspect.signature(EpochBatchIterator.__init__).parameters
    reuse = {"reuse_dataloader": True} if "reuse_dataloader" in known else {}
    data = torch.utils.data.TensorDataset(torch.arange(8))
    batches = [[index] for index in range(8)]
    iterator = EpochBatchIterator(data, list, batches, seed=1, **reuse)
    epochs = (iterator.next_epoch_itr(shuffle=epoch > 2) for epoch in range(1, 5))
    return [[int(index) for ((index,),) in epoch] for epoch in epochs]


def test_shuffled_after_the_curriculum(which, process):
    first, second, third, fourth = process.call(orders)
    assert first == second == list(range(8))
    works = which == "patched" or CURRICULUM.unneeded() is not None
    assert (third != first) == (fourth != third) == works


def train_both(first, second):
    """Two trainings of one process, as a grid of hydra has them."""
    import importlib
    import sys

    for arguments in (first, second):
        sys.argv = ["fairseq-train", *arguments]
        importlib.import_module("fairseq_cli.train").cli_main()


def test_a_second_training_begins_anew(which, process, data, tmp_path):
    """The second one does not learn: its first epoch is the best, and a patience of 2 ends it."""
    process.call(
        train_both,
        first=train_arguments(data, tmp_path / "a", "--max-epoch", "1", "--patience", "2"),
        second=train_arguments(
            *(data, tmp_path / "b", "--lr", "0", "--max-epoch", "9", "--patience", "2")
        ),
    )
    names = {"bare": ("1", "2", "_last"), "patched": ("1", "2", "3", "_last", "_best")}[which]
    found = {path.name for path in (tmp_path / "b").iterdir()}
    assert found == {f"checkpoint{name}.pt" for name in names}


def updates_of(path):
    import torch

    options = {"weights_only": False} if torch.__version__ >= "1.13" else {}
    return torch.load(path, **options)["optimizer_history"][-1]["num_updates"]


def test_validation_on_the_training_split_uses_up_no_epoch(which, process, data, tmp_path):
    updates = []
    for subsets in ("valid", "valid,train"):
        more = ("--max-epoch", "3", "--valid-subset", subsets, "--no-epoch-checkpoints")
        folder = tmp_path / subsets
        process.cli("fairseq_cli.train", *train_arguments(data, folder, *more))
        updates.append(process.call(updates_of, path=str(folder / "checkpoint_last.pt")))
    assert (updates[0] == updates[1]) == (which == "patched")


# Float32 weights


@HALF_LAYERS_ON_CPU
def test_half_precision_goes_on_with_the_float32_weights(
    which, process, data, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # or the bare one cannot resume

    def trained(folder, *epochs):
        for epoch in epochs:
            more = ("--fp16", "--fp16-no-flatten-grads", "--max-epoch", epoch)
            process.cli("fairseq_cli.train", *train_arguments(data, tmp_path / folder, *more))
        return torch.load(tmp_path / folder / "checkpoint2.pt", **LOAD_ANYTHING)["model"]

    through, resumed = trained("through", "2"), trained("resumed", "1", "2")
    assert same_states(through, resumed) == (which == "patched")
    table = through["encoder.embed_tokens.weight"]
    assert table.dtype == torch.float32
    assert torch.equal(table.half().float(), table) == (which == "bare")


def test_a_copy_of_its_own_may_lie_transposed():
    half = torch.nn.Parameter(torch.randn(3, 4).t().bfloat16())
    copy = torch.nn.Parameter(half.data.float())
    optimizer = SimpleNamespace(fp16_params=[half], fp32_params=[copy])
    assert view_for(float32_copies(optimizer)[id(half)], half).data_ptr() == copy.data_ptr()


def test_copies_that_are_flattened_are_saved_and_restored():
    optimizer, params, flat = flattened_fp16()
    model = torch.nn.ParameterList(params)
    trainer = SimpleNamespace(optimizer=optimizer, get_model=lambda: model)
    saved = saving_float32(lambda _: {"model": model.state_dict()})(trainer)["model"]
    assert torch.equal(torch.cat([one.view(-1) for one in saved.values()]), flat.detach())

    def load(*_):
        model.load_state_dict(saved)
        with torch.no_grad():
            params[1].zero_()  # the file's weight is not what the model goes on with

    with torch.no_grad():
        flat.zero_()
    restoring_float32(load)(trainer, "checkpoint.pt")
    restored = [view_for(held, p) for p, held in zip(params, float32_copies(optimizer).values())]
    assert torch.equal(restored[0], saved["0"]) and torch.equal(restored[2], saved["2"])
    assert not restored[1].any()
