"""Hostile checkpoints made by code: damaged, of wrong contents, or with code in them.

:data:`KINDS` says which must be refused by whatever reads them. ``studies/fuzz`` gives them, and
hostile folders of data, to every command.
"""

from __future__ import annotations

import argparse
import builtins
import gzip
import importlib
import os
import random
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

import torch
from omegaconf import OmegaConf

from spectral_fairseq.checkpoints.reading import torch_load
from spectral_fairseq.checkpoints.settings import EVALUATED, OF_FCONV


class Making(NamedTuple):
    """What a maker of a hostile file works with.

    Attributes:
        path: the checkpoint to write; an intact one is there. For data, the folder.
        marker: the file that code in the hostile file makes if it is run.
        chance: source of all choices.
    """

    path: Path
    marker: Path
    chance: random.Random


def cut(making: Making) -> None:
    content = making.path.read_bytes()
    making.path.write_bytes(content[: making.chance.randrange(len(content))])


def flip(making: Making) -> None:
    flip_bits(making.path, making.chance)


def flip_bits(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 2, 8))):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(bytes(content))


def overwrite(making: Making) -> None:
    content = bytearray(making.path.read_bytes())
    start = making.chance.randrange(len(content))
    content[start : start + 512] = making.chance.randbytes(512)
    making.path.write_bytes(bytes(content))


def older_format(making: Making) -> None:
    state = torch_load(making.path)
    torch.save(state, making.path, _use_new_zipfile_serialization=False)
    making.chance.choice((cut, flip))(making)


def no_checkpoint(making: Making) -> None:
    content = making.chance.choice(
        (b"", b"text\n", bytes(10_000), b"PK\x03\x04", b"\x80\x02.", gzip.compress(bytes(1000)))
    )
    making.path.write_bytes(content)


def no_file(making: Making) -> None:
    making.path.unlink()
    kind = making.chance.choice(("pipe", "folder", "endless", "dangling", "circle"))
    if kind == "pipe":
        os.mkfifo(making.path)
    elif kind == "folder":
        making.path.mkdir()
    else:
        targets = {"endless": "/dev/zero", "dangling": "/nonexistent", "circle": making.path.name}
        making.path.symlink_to(targets[kind])


def bomb(making: Making) -> None:
    """Many bytes from few: compressed zeros, or entries that overlap."""
    if making.chance.random() < 0.5:
        content = making.path.with_suffix(".zip")
        with zipfile.ZipFile(making.path) as old, zipfile.ZipFile(content, "w") as new:
            for entry in old.infolist():
                new.writestr(entry.filename, old.read(entry), zipfile.ZIP_DEFLATED)
            new.writestr("archive/data/999", bytes(20_000_000), zipfile.ZIP_DEFLATED)
        content.rename(making.path)
        return
    with zipfile.ZipFile(making.path, "a") as archive:
        largest = max(archive.filelist, key=lambda entry: entry.file_size)
        archive.filelist += [largest] * 1000
        archive._didModify = True


class Call:
    """A call that unpickling this object makes."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def foreign_object(making: Making) -> None:
    """An object that runs code when it is loaded, somewhere in the checkpoint."""
    touch = f"touch {making.marker}"
    python = f"open({str(making.marker)!r}, 'w')"
    call = making.chance.choice(
        (
            Call(os.system, touch),
            Call(builtins.eval, python),
            Call(builtins.exec, python),
            Call(builtins.open, str(making.marker), "w"),
            Call(subprocess.check_output, touch.split()),
            Call(getattr, Call(importlib.import_module, "os"), "system"),
            Call(builtins.compile, python, "x", "exec"),
        )
    )
    state = torch_load(making.path)
    _change(state, making.chance, lambda _: call)
    torch.save(state, making.path)


def code_in_a_setting(making: Making) -> None:
    """A string that fairseq would evaluate, in any of the places where settings are."""
    state = torch_load(making.path)
    name = making.chance.choice(sorted(EVALUATED))
    text = making.chance.choice(
        (
            f"open({str(making.marker)!r}, 'w') and [10]",
            f"__import__('os').system('touch {making.marker}') or [10, 20]",
            f"[10 for _ in [open({str(making.marker)!r}, 'w')]]",
            f"(lambda: open({str(making.marker)!r}, 'w'))()",
            "().__class__.__base__.__subclasses__()",
            "9**9**9**9",
        )
    )
    place = making.chance.choice(("model", "task", "optimization", "args"))
    if name in OF_FCONV:  # names that mean something else in other models
        state["cfg"]["model"] = {**dict(state["cfg"]["model"]), "_name": "fconv_self_att"}
    if place == "args":
        state["args"] = argparse.Namespace(**{**dict(state["cfg"]["model"]), name: text})
    else:
        state["cfg"][place] = {**dict(state["cfg"][place] or {}), name: text}
    torch.save(state, making.path)


VALUES: List[Any] = [
    *(None, 0, -1, 10**30, 1.5, float("nan"), True, "", "text", "\x1b[31m", b"bytes", [], {}),
    *([1, "a"], {"a": 1}, {3: 4}, (), torch.zeros(0), torch.ones(2, 2), argparse.Namespace(a=1)),
    *map(OmegaConf.create, ({"a": "???"}, {"a": "${nowhere}"}, {"a": "${a}"}, ["???"], {})),
]


def wrong_entry(making: Making) -> None:
    """Something else in the place of an entry, at any depth, or a missing entry."""
    state = torch_load(making.path)
    value = making.chance.choice([*VALUES, KeyError])
    _change(state, making.chance, lambda _: value)
    torch.save(state, making.path)


def _change(state: Dict[Any, Any], chance: random.Random, to: Callable[[Any], Any]) -> None:
    """Change a random entry; the class KeyError removes it."""
    node = state
    while True:
        name = chance.choice(sorted(node, key=str))
        inner = node[name]
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            inner = inner[0]
        if not isinstance(inner, dict) or not inner or chance.random() < 0.4:
            break
        node = inner
    value = to(node[name])
    if value is KeyError:
        del node[name]
    else:
        node[name] = value


TENSORS: Dict[str, Callable[[torch.Tensor], Any]] = {
    "zeros": torch.zeros_like,
    "not a number": lambda one: one * float("nan"),
    "infinite": lambda one: one + float("inf"),
    "huge": lambda one: one * 1e38,
    "scalar": lambda one: one.sum(),
    "flat": lambda one: one.flatten(),
    "one more dimension": lambda one: one.unsqueeze(0),
    "cut": lambda one: one.reshape(-1, *one.shape[1:])[:1],
    "empty": lambda one: one.reshape(-1, *one.shape[1:])[:0],
    "longer": lambda one: one.reshape(-1, *one.shape[1:]).repeat_interleave(2, 0),
    "transposed": lambda one: one.t() if one.dim() == 2 else one,
    "whole numbers": lambda one: one.long(),
    "yes or no": lambda one: one.bool(),
    "half": lambda one: one.half(),
    "double": lambda one: one.double(),
    "complex": lambda one: one.to(torch.complex64),
    "sparse": lambda one: one.to_sparse(),
    "meta": lambda one: one.to("meta"),
    "expanded": lambda one: torch.ones(1).expand(10**6, 10**6),
    "no tensor": lambda _: 3,
}


def wrong_tensor(making: Making) -> None:
    state = torch_load(making.path)
    model = state["model"]
    for name in making.chance.sample(sorted(model), making.chance.choice((1, 1, 3))):
        model[name] = TENSORS[making.chance.choice(sorted(TENSORS))](model[name])
    torch.save(state, making.path)


def wrong_names(making: Making) -> None:
    state = torch_load(making.path)
    model, chance = state["model"], making.chance
    name = chance.choice(sorted(model))
    kind = chance.choice(("drop", "rename", "add", "all", "number"))
    tensor = model[name]
    if kind == "all":
        state["model"] = {}
    elif kind == "add":
        model[f"{name}.{chance.choice(('u', 'v', 'sigma', 'weight', 'table', 'g'))}"] = tensor
    else:
        del model[name]
        if kind == "rename":
            model[name.replace("decoder", chance.choice(("encoder", "", "\n\x1b[0m")))] = tensor
        elif kind == "number":
            model[7] = tensor
    torch.save(state, making.path)


class Kind(NamedTuple):
    """A kind of hostile file.

    Attributes:
        make: makes one in the place of an intact file.
        refused: whether every command must refuse it; else it may be harmless, as a flipped bit
            that nobody reads.
    """

    make: Callable[[Making], None]
    refused: bool


KINDS = (
    Kind(cut, refused=True),
    Kind(flip, refused=False),
    Kind(overwrite, refused=False),
    Kind(older_format, refused=False),
    Kind(no_checkpoint, refused=True),
    Kind(no_file, refused=True),
    Kind(bomb, refused=True),
    Kind(foreign_object, refused=True),
    Kind(code_in_a_setting, refused=True),
    Kind(wrong_entry, refused=False),
    Kind(wrong_tensor, refused=False),
    Kind(wrong_names, refused=False),
)


def make(kind: Kind, number: int, intact: Path, folder: Path) -> Making:
    """Make a hostile file in an empty folder.

    Args:
        kind: of the file.
        number: decides all choices.
        intact: a checkpoint of a language model, or a folder of data.
        folder: gets the file.
    """
    path = folder / ("data" if intact.is_dir() else "hostile.pt")
    making = Making(path, folder / "executed", random.Random(f"hostile {number}"))
    if intact.is_dir():
        shutil.copytree(intact, path)
    else:
        shutil.copy(intact, path)
    kind.make(making)
    return making
