"""A process of joblib can start those that load data."""

from __future__ import annotations

from typing import List

import pytest

from spectral_fairseq.compat.machines import JOBLIB_WORKERS as PATCH
from tests.compat.fairseq_process import Failure, FairseqProcess

pytest.importorskip("joblib")


def loaded(with_patch: bool) -> List[int]:
    """Numbers that come from a process for loading data."""
    import multiprocessing

    import joblib.externals.loky  # noqa: F401  (registers its way of starting processes)
    import torch

    multiprocessing.set_start_method("loky", force=True)
    if with_patch:
        from spectral_fairseq.compat import patch_fairseq

        patch_fairseq()
    loader = torch.utils.data.DataLoader(list(range(4)), collate_fn=list, num_workers=1)
    return [number for batch in loader for number in batch]


def test_data_are_loaded(bare: FairseqProcess) -> None:
    with pytest.raises(Failure, match="no attribute 'env'"):
        bare.call(loaded, with_patch=False)
    assert bare.call(loaded, with_patch=True) == [0, 1, 2, 3]


def test_other_processes_are_left_alone() -> None:
    assert PATCH.unneeded() is not None
