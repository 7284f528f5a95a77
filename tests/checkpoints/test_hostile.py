"""Hostile checkpoints: none is executed, and those that must be refused are refused."""

import pytest
import torch

from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.errors import CheckpointError
from tests.capabilities import LOAD_ANYTHING
from tests.checkpoints import hostile
from tests.language_models import block_checkpoint

FILES = 20  # of each kind


@pytest.mark.parametrize("index", range(len(hostile.KINDS)))
def test_hostile_checkpoints(index, train, tmp_path):
    checkpoint, kind = block_checkpoint(train), hostile.KINDS[index]
    for number in range(FILES * index, FILES * (index + 1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        making = hostile.make(kind, number, checkpoint, folder)
        try:
            load_checkpoint(making.path)
        except CheckpointError:
            pass
        else:
            assert not kind.refused
        assert not making.marker.exists()
        if making.path.is_file():
            making.path.unlink()


def test_code_would_be_found(train, tmp_path):
    """The marker appears where a file is loaded without a check."""
    (kind,) = (one for one in hostile.KINDS if one.make is hostile.foreign_object)
    executed = False
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        making = hostile.make(kind, number, block_checkpoint(train), folder)
        torch.load(making.path, **LOAD_ANYTHING)
        executed = executed or making.marker.exists()
    assert executed
