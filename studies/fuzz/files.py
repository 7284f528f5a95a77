"""Hostile files through every command that reads them.

No command may run code from a file, hang, or end in a traceback of this package; ``KINDS`` of
``tests/checkpoints/hostile.py`` says which checkpoints must be refused by all of them. A file is
determined by its number.
"""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import Any, Dict, List

from studies.fuzz.forks import BAD, DONE, EXECUTED, FAIRSEQ, REFUSED, line, run, run_all
from studies.fuzz.training import PLUGIN
from tests.checkpoints import hostile
from tests.fork_server import ForkServer


def data_cut(making: hostile.Making) -> None:
    path = _data_file(making)
    content = path.read_bytes()
    path.write_bytes(content[: making.chance.randrange(len(content))])


def data_flip(making: hostile.Making) -> None:
    hostile.flip_bits(_data_file(making), making.chance)


def _data_file(making: hostile.Making) -> Path:
    names = ("train.idx", "train.bin", "valid.idx", "valid.bin", "dict.txt")
    return making.path / making.chance.choice(names)


def foreign_token(making: hostile.Making) -> None:
    path = making.path / f"{making.chance.choice(('train', 'valid'))}.bin"
    content = bytearray(path.read_bytes())
    place = 2 * making.chance.randrange(len(content) // 2)
    struct.pack_into("<H", content, place, making.chance.choice((9_999, 65_535)))
    path.write_bytes(bytes(content))


def wrong_dictionary(making: hostile.Making) -> None:
    line_ = making.chance.choice(
        (f"new {10**40}", "new -1", "new \u00b2", "w1 3", "new", "\x00 1", "new 1e3", "\x1b[31m x")
    )
    with open(making.path / "dict.txt", "a", encoding="utf-8") as file:
        file.write(line_ + "\n")


def data_no_file(making: hostile.Making) -> None:
    path = _data_file(making)
    hostile.no_file(making._replace(path=path))


DATA = (
    hostile.Kind(data_cut, refused=False),
    hostile.Kind(data_flip, refused=False),
    hostile.Kind(data_no_file, refused=False),
    hostile.Kind(foreign_token, refused=False),
    hostile.Kind(wrong_dictionary, refused=False),
)
KINDS = (*hostile.KINDS, *DATA)
TAKEN = "taken, though it must be refused"
FAILURES = (*BAD, TAKEN)


class Hostile:
    """Runs the cases.

    Args:
        server: forks that have imported this package.
        checkpoint: an intact checkpoint of ``transformer_lm_sc``.
        data: its data.
        folder: scratch; emptied by every case.
    """

    def __init__(self, server: ForkServer, checkpoint: Path, data: Path, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._checkpoint, self._data = checkpoint, data

    def run(self, number: int) -> Dict[str, Any]:
        """Run the case of a number; returns its line of the record."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        kind = KINDS[number % len(KINDS)]
        intact = self._data if kind in DATA else self._checkpoint
        making = hostile.make(kind, number, intact, self._folder)
        path, data = (
            (self._checkpoint, making.path) if kind in DATA else (making.path, self._data)
        )  # fmt: skip
        out = self._folder / "out.pt"
        ours: Dict[str, List[Any]] = {
            "analyze": ["analyze", path, "--data", data, "--dict", self._data],
            "evaluate-lm": ["evaluate-lm", path, data, "--cpu"],
        }
        if kind not in DATA:
            ours["compare"] = ["compare", self._checkpoint, path]
            ours["average"] = ["average", path, path, "--output", out, "--overwrite"]
            ours["export"] = ["export", path, out, "--overwrite"]
        ended = run_all(self._server, ours, self._folder)
        commands: Dict[str, List[Any]] = {}
        commands["validate"] = ["fairseq-validate", data, *PLUGIN, "--path", path, "--cpu"]
        commands["validate"] += ["--task", "language_modeling", "--max-tokens", 96]
        commands["train"] = ["fairseq-train", data, *PLUGIN, "--restore-file", path, "--cpu"]
        commands["train"] += [*TRAINING, "--max-update", 3, "--save-dir", self._folder / "saved"]
        if not os.path.isfile(path):
            del commands["train"]  # fairseq takes it for absent, and starts afresh
        for name, argv in commands.items():
            ended[name] = run(self._server, argv, self._folder)
        found = {name: one.outcome for name, one in ended.items()}
        outcome = REFUSED if set(found.values()) == {REFUSED} else DONE
        bad = [name for name in found if found[name] not in (DONE, REFUSED, FAIRSEQ)]
        if kind.refused:
            bad += [name for name in found if found[name] == DONE]
        error = ""
        if bad:
            name = bad[0]
            outcome = TAKEN if found[name] == DONE else found[name]
            error = f"{name}: {ended[name].error}"[:400]
        if making.marker.exists():
            outcome = EXECUTED
        return line(
            "file", number, outcome, made_by=kind.make.__name__, error=error, commands=found
        )


# The training of the intact checkpoint.
TRAINING = (
    *("--arch", "transformer_lm_sc", "--task", "language_modeling", "--tokens-per-sample", "16"),
    *("--criterion", "spectrum_control", "--share-decoder-input-output-embed"),
    *("--decoder-embed-dim", "16", "--decoder-input-dim", "16", "--decoder-output-dim", "16"),
    *("--decoder-ffn-embed-dim", "24", "--decoder-layers", "1", "--decoder-attention-heads", "2"),
    *("--optimizer", "adam", "--lr", "0.005", "--max-tokens", "96", "--num-workers", "0"),
    *("--data-buffer-size", "0", "--log-format", "simple", "--log-interval", "1"),
)
