"""A checkpoint that is written in the background can be read."""

import pytest
import torch

from spectral_fairseq.provenance import torch_release


def saved_in_background(folder):
    """Save as fairseq's trainer does, to a file that writes when it is closed, as ioPath's may."""
    import io
    import os
    from unittest import mock

    import torch
    from fairseq import checkpoint_utils
    from fairseq.file_io import PathManager

    class Later(io.RawIOBase):
        def __init__(self, path, mode):
            self.path, self.mode, self.noted = path, mode, []

        def writable(self):
            return True

        def write(self, data):
            self.noted.append(data)
            return len(data)

        def close(self):
            if not self.closed:
                with open(self.path, self.mode) as file:
                    for data in self.noted:
                        file.write(data)
            super().close()

    path = os.path.join(folder, "checkpoint1.pt")
    state = {"model": {name: torch.arange(3_000.0) for name in "abc"}, "done": 7}
    with mock.patch.object(PathManager, "opena", Later):
        checkpoint_utils.torch_persistent_save(state, path, async_write=True)
    try:
        found = torch.load(path)
    except Exception:
        return "damaged"
    equal = all(torch.equal(value, found["model"][name]) for name, value in state["model"].items())
    return "whole" if equal and found["done"] == 7 else "damaged"


def test_what_is_written_later_is_what_was_saved(bare, patched, tmp_path):
    if torch_release() >= (2, 0):  # before, it writes copies
        bare.gives("damaged", saved_in_background, folder=str(tmp_path))
    patched.gives("whole", saved_in_background, folder=str(tmp_path))


def test_training_with_iopath_itself(data, tmp_path, patched):
    pytest.importorskip("iopath")
    from tests.compat.conftest import train_arguments

    flags = ("--max-epoch", "2", "--write-checkpoints-asynchronously")
    patched.cli("fairseq_cli.train", *train_arguments(data, tmp_path, *flags))
    for epoch in (1, 2):
        state = torch.load(tmp_path / f"checkpoint{epoch}.pt", weights_only=False)
        assert state["extra_state"]["train_iterator"]["epoch"] == epoch + 1
