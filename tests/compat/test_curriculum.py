from __future__ import annotations

from typing import List

import pytest

from spectral_fairseq.compat.resuming import CURRICULUM as PATCH
from tests.compat.fairseq_process import FairseqProcess


def orders() -> List[List[int]]:
    """The order of eight batches in four epochs, of which the last two are shuffled."""
    import inspect

    from fairseq.data import FairseqDataset
    from fairseq.data.iterators import EpochBatchIterator

    class Numbers(FairseqDataset):
        def __getitem__(self, index: int) -> int:
            return index

        def __len__(self) -> int:
            return 8

        def collater(self, samples: list) -> list:
            return samples

    known = inspect.signature(EpochBatchIterator.__init__).parameters
    reuse = {"reuse_dataloader": True} if "reuse_dataloader" in known else {}
    numbers = Numbers()
    iterator = EpochBatchIterator(
        numbers, numbers.collater, [[index] for index in range(8)], seed=1, **reuse
    )
    return [
        [batch[0] for batch in iterator.next_epoch_itr(shuffle=epoch > 2)] for epoch in range(1, 5)
    ]


@pytest.mark.parametrize("which", ["bare", "patched"])
def test_shuffled_after_the_curriculum(which: str, request: pytest.FixtureRequest) -> None:
    process: FairseqProcess = request.getfixturevalue(which)
    first, second, third, fourth = process.call(orders)
    assert first == second == list(range(8))
    works = which == "patched" or PATCH.unneeded() is not None
    assert (third != first) == (fourth != third) == works
