"""Hostile checkpoints: none is executed, and those that must be refused are refused."""

import itertools

import pytest
import torch

from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.errors import CheckpointError
from tests.capabilities import LOAD_ANYTHING
from tests.checkpoints import hostile
from tests.language_models import block_checkpoint

CHECKPOINTS = [index for index, kind in enumerate(hostile.KINDS) if not kind.data]


@pytest.mark.parametrize("index", CHECKPOINTS)
def test_hostile_checkpoints(index, train, tmp_path):
    checkpoint = block_checkpoint(train)
    for number in range(index, 20 * len(hostile.KINDS), len(hostile.KINDS)):
        folder = tmp_path / str(number)
        folder.mkdir()
        making = hostile.make(number, checkpoint, tmp_path, folder)
        try:
            load_checkpoint(making.path)
        except CheckpointError:
            pass
        else:
            assert not hostile.KINDS[index].refused
        assert not making.marker.exists()
        if making.path.is_file():
            making.path.unlink()


def test_code_would_be_found(train, tmp_path):
    """The marker appears where a file is loaded without a check."""
    made = [kind.make for kind in hostile.KINDS].index(hostile.foreign_object)
    executed = False
    for number in itertools.islice(itertools.count(made, len(hostile.KINDS)), 6):
        folder = tmp_path / str(number)
        folder.mkdir()
        making = hostile.make(number, block_checkpoint(train), tmp_path, folder)
        torch.load(making.path, **LOAD_ANYTHING)
        executed = executed or making.marker.exists()
    assert executed
