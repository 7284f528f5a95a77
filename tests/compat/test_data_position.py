"""A run that is resumed with another number of workers takes the batches that are left."""

from __future__ import annotations

from typing import List

import pytest

from tests.compat.fairseq_process import Failure, FairseqProcess

BATCHES = 17


def taken_and_left(before: int, after: int, taken: int, batches: int) -> List[List[int]]:
    """Batches that some workers take, and those that others take after a resume."""
    import torch
    from fairseq.data.iterators import EpochBatchIterator

    data = torch.utils.data.TensorDataset(torch.arange(batches))

    def iterators(workers: int) -> list:
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


@pytest.mark.parametrize("before, after, taken", [(2, 1, 4), (1, 2, 4), (1, 2, 16), (4, 2, 3)])
def test_every_batch_is_taken_once(
    before: int, after: int, taken: int, patched: FairseqProcess
) -> None:
    call = {"before": before, "after": after, "taken": taken, "batches": BATCHES}
    first, second = patched.call(taken_and_left, **call)
    assert len(first) == before * taken and sorted(first + second) == list(range(BATCHES))


def test_some_twice_where_the_number_does_not_divide(patched: FairseqProcess) -> None:
    first, second = patched.call(taken_and_left, before=3, after=2, taken=3, batches=BATCHES)
    assert set(first + second) == set(range(BATCHES))
    assert len(first + second) == BATCHES + 1


def test_fairseq_alone_repeats_batches_or_fails(bare: FairseqProcess) -> None:
    first, second = bare.call(taken_and_left, before=2, after=1, taken=4, batches=BATCHES)
    assert len(first + second) == BATCHES + 4
    with pytest.raises(Failure, match="dataloader mismatch"):
        bare.call(taken_and_left, before=1, after=2, taken=12, batches=BATCHES)


def test_the_number_of_workers_is_not_needed(patched: FairseqProcess) -> None:
    """Checkpoints of unpatched runs have none, and some hold None."""
    assert patched.call(restored, num_shards=None) == 5
    assert patched.call(restored) == 5


def restored(**saved: object) -> int:
    import torch
    from fairseq.data.iterators import EpochBatchIterator

    batches = [[index] for index in range(9)]
    data = torch.utils.data.TensorDataset(torch.arange(9))
    iterator = EpochBatchIterator(data, list, batches, num_shards=1)
    iterator.load_state_dict({"version": 2, "epoch": 1, "iterations_in_epoch": 5, **saved})
    return iterator.iterations_in_epoch
