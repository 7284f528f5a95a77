"""Checkpoints with a table that the test chose, saved as fairseq saves them."""

import zipfile

import torch

from spectral_fairseq.embeddings import TABLES
from spectral_fairseq.formats.matrices import Matrices
from spectral_fairseq.formats.stored import Stored
from spectral_fairseq.formats.table import read_table
from spectral_fairseq.formats.which_table import choose

NAME = "decoder.embed_tokens"


def entries(weight, kind="plain", name=NAME):
    """A checkpoint's entries for a table of any kind that equals ``weight``."""
    (table,) = (table for table in TABLES if table.kind == kind)
    stored = table.from_dense(weight, 1).state_dict()
    return {f"{name}.{key}": value for key, value in stored.items()}


def matrices(tensors):
    """The matrices of a model in memory, and its tables over words."""
    return Matrices(Stored("x.pt", tensors))


def chosen(tensors, wanted=None):
    """The modules that hold the table to measure of a model in memory."""
    return choose(Stored("x.pt", tensors), wanted).names


def extracted(tensors, wanted=None, excluded=(1,)):
    """The table of a model in memory as it is measured, without fairseq's padding row."""
    return read_table(choose(Stored("x.pt", tensors), wanted), excluded)


def with_padding(rows):
    """``rows``, one a word, with fairseq's zero padding row put in as row 1."""
    return torch.cat([rows[:1], torch.zeros_like(rows[:1]), rows[1:]])


def save(path, tensors, updates=None, **cfg):
    """Write a checkpoint; ``cfg`` are its configuration's nodes."""
    history = [{"num_updates": updates}] if updates is not None else []
    torch.save(
        {
            "args": None,
            "cfg": cfg or None,
            "model": tensors,
            "optimizer_history": history,
            "extra_state": {"train_iterator": {"epoch": 2}},
        },
        path,
    )
    return path


def save_dictionary(path, count, prefix="w"):
    """dict.txt of ``count`` words beside the four special symbols, counts falling."""
    lines = [f"{prefix}{index} {1000 // (index + 1) + 1}\n" for index in range(count)]
    path.write_text("".join(lines), "utf-8")
    return path


def cone(n=60, d=6, spread=0.3, seed=0):
    """A Gaussian cloud away from the origin."""
    torch.manual_seed(seed)
    return spread * torch.randn(n, d) + torch.randn(d)


def flipped(path, of_entry):
    """Flip a bit of one entry of a saved checkpoint."""
    with zipfile.ZipFile(path) as archive:
        (entry,) = [one for one in archive.infolist() if one.filename.endswith(of_entry)]
        content = archive.read(entry)
    data = bytearray(path.read_bytes())
    data[bytes(data).index(content) + len(content) // 2] ^= 1
    path.write_bytes(bytes(data))


class Payload:
    """An object that writes a file when a careless reader loads it."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return exec, (f"open({str(self.marker)!r}, 'w')",)
