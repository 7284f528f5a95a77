"""A resumed training has the batches of the uninterrupted one."""

import pytest

from tests.capabilities import LOAD_ANYTHING
from tests.plugin.trainers import same_states


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
@pytest.mark.parametrize("more", ["", "--update-ordered-indices-seed"])
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
