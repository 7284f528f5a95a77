"""BASE layers work where fairseq's compiled library does not fit torch."""

from __future__ import annotations

import itertools
from typing import Any, List

import pytest
import torch

from spectral_fairseq.compat.machines import balanced_assignment
from spectral_fairseq.errors import ConfigurationError
from tests.compat.fairseq_process import Failure, FairseqProcess

pytest.importorskip("scipy")


def layer() -> List[Any]:
    """A step of a BASE layer of one worker: whether its output and gradient are finite."""
    import tempfile
    from argparse import Namespace

    import torch
    from fairseq.modules.base_layer import BaseLayer

    args = Namespace(decoder_embed_dim=4, decoder_ffn_embed_dim=8, base_sublayers=1)
    args.base_shuffle = 0
    with tempfile.NamedTemporaryFile() as meeting:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{meeting.name}", rank=0, world_size=1
        )
        module = BaseLayer(args)
        features = torch.ones(6, 1, 4).cumsum(0).requires_grad_()
        output = module(features)[0]
        output.sum().backward()
        torch.distributed.destroy_process_group()
    return [list(output.shape), bool(torch.isfinite(features.grad).all())]


def test_a_layer(bare: FairseqProcess, patched: FairseqProcess) -> None:
    try:
        bare.call(layer)
    except Failure as failure:
        assert "undefined symbol" in failure.message or "libbase" in failure.message
    else:
        pytest.skip("this fairseq's library fits this torch")
    assert patched.call(layer) == [[6, 1, 4], True]


def test_the_assignment_is_the_best() -> None:
    scores = torch.tensor([[9.0, 8], [9, 1], [8, 7.5], [7, 6.5], [1, 0], [2, 9]])
    found = balanced_assignment(scores).tolist()
    assert sorted(found) == [*range(6)]

    def total(first: Any) -> float:
        return float(sum(scores[token, 0 if token in first else 1] for token in range(6)))

    assert total(found[:3]) == max(map(total, itertools.combinations(range(6), 3)))


def test_tokens_that_cannot_be_shared() -> None:
    with pytest.raises(ConfigurationError, match="found 5"):
        balanced_assignment(torch.zeros(5, 2))
