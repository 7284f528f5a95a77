"""A resumed run composes the batches of the uninterrupted one."""

from typing import List

import pytest

from tests.capabilities import LOAD_ANYTHING
from tests.compat.fairseq_process import FairseqProcess
from tests.plugin.trainers import same_states


def batches(epoch: int, reused: bool, seed_by_epoch: bool = True) -> List[object]:
    """The batches of a training that begins in an epoch, and what it knows of that epoch."""
    import argparse

    import numpy as np
    from fairseq.data import FairseqDataset
    from fairseq.tasks import LegacyFairseqTask

    class Sentences(FairseqDataset):
        can_reuse_epoch_itr_across_epochs = reused

        def __getitem__(self, index: int) -> int:
            return index

        def __len__(self) -> int:
            return 30

        def num_tokens(self, index: int) -> int:
            return 1

        def num_tokens_vec(self, indices: "np.ndarray") -> "np.ndarray":
            return np.ones(len(indices), dtype=np.int64)

        def collater(self, samples: list) -> list:
            return samples

        def ordered_indices(self) -> "np.ndarray":
            return np.random.permutation(30)

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    sentences = Sentences()
    task = LegacyFairseqTask(argparse.Namespace())
    task._seed_follows_epoch = seed_by_epoch  # as the patched Trainer.get_train_iterator does
    seed = 1 + epoch * seed_by_epoch
    iterator = task.get_batch_iterator(sentences, max_sentences=4, seed=seed, epoch=epoch)
    composed = [[int(index) for index in batch] for batch in iterator.frozen_batches]
    assert task.get_batch_iterator(sentences, max_sentences=4, seed=1, epoch=9) is iterator or (
        not reused
    )
    return [composed, iterator.epoch, sentences.epoch]


@pytest.mark.parametrize("by_epoch", [False, True])
def test_resumed_as_uninterrupted(patched: FairseqProcess, by_epoch: bool) -> None:
    first, *_ = patched.call(batches, epoch=1, reused=True, seed_by_epoch=by_epoch)
    later, *epochs = patched.call(batches, epoch=3, reused=True, seed_by_epoch=by_epoch)
    assert first == later and epochs == [3, 3]


def test_datasets_that_change_from_epoch_to_epoch_are_left_alone(patched: FairseqProcess) -> None:
    first, *_ = patched.call(batches, epoch=1, reused=False)
    later, *_ = patched.call(batches, epoch=3, reused=False)
    assert first != later


def test_fairseq_alone_composes_others(bare: FairseqProcess) -> None:
    first, *_ = bare.call(batches, epoch=1, reused=True)
    later, *_ = bare.call(batches, epoch=3, reused=True)
    assert first != later


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--curriculum 2", "--update-ordered-indices-seed"])
def test_a_translation_resumed_in_its_third_epoch(more, train) -> None:  # type: ignore[no-untyped-def]
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
