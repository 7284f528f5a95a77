"""A training that is resumed with other workers goes on at its place in the data."""

import pytest

from tests.compat.fairseq_process import Fails

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
