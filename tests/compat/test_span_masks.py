"""Masks of spans, of wav2vec and HuBERT, can be drawn."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest

from tests.compat.fairseq_process import Failure, FairseqProcess


def masked(drawing: str, **settings: Any) -> List[List[int]]:
    """Lengths of the masked runs of each row."""
    import itertools

    import torch
    from fairseq.data import data_utils

    draw = getattr(data_utils, drawing)
    fixed = {"seed": 1, "epoch": 1, "indices": torch.arange(2)}
    mask = draw((2, 60), None, 0.4, 3, require_same_masks=False, **fixed, **settings)
    return [[len([*run]) for one, run in itertools.groupby(row) if one] for row in mask]


CASES: List[Dict[str, Any]] = [
    {"no_overlap": True, "min_space": 1},
    {"mask_type": "uniform", "mask_other": 2.0},
]


@pytest.mark.parametrize("settings", CASES)
@pytest.mark.parametrize("drawing", ["compute_mask_indices", "compute_mask_indices_v3"])
def test_spans(
    drawing: str, settings: Dict[str, Any], bare: FairseqProcess, patched: FairseqProcess
) -> None:
    call = {"drawing": drawing, **settings}
    try:
        bare.call(masked, **call)
    except Failure as failure:
        if "has no attribute 'compute_mask_indices_v3'" in failure.message:
            pytest.skip("this fairseq has one function for masks")
        if "seed" in failure.message:
            pytest.skip("this fairseq draws from numpy's global generator")
        assert "randint" in failure.message or "np.int" in failure.message
    else:
        pytest.fail("fairseq needs no patch")
    rows = patched.call(masked, **call)
    assert all(sum(row) > 5 for row in rows)
    assert rows == patched.call(masked, **call)  # the seed still counts
    if "no_overlap" in settings:
        assert {length for row in rows for length in row} == {3}


def drawn() -> List[bool]:
    import numpy as np
    from fairseq.data import data_utils

    ours, numpys = data_utils.np.random.default_rng(3), np.random.default_rng(3)
    same = [ours.random() == numpys.random(), ours.choice(9) == numpys.choice(9)]
    return [bool(one) for one in same] + [hasattr(numpys, "randint")]


def test_the_numbers_are_numpys(patched: FairseqProcess) -> None:
    assert patched.call(drawn) == [True, True, False]
