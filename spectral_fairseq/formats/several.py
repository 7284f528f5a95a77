"""A model in several files: those that an index names, and numbered ones."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from torch import Tensor

from spectral_fairseq.errors import DataError, PartsError, listed
from spectral_fairseq.files import read_json_object
from spectral_fairseq.formats.parts import check_no_part
from spectral_fairseq.formats.stored import Stored, Unread
from spectral_fairseq.functional.row_blocks import same_values

# Each file holds other tensors of one model, as model-00001-of-00004.safetensors.
_OF = re.compile(r"(\d+)[-_]of[-_](\d+)")
_MOST_FILES = 10_000


class Files(NamedTuple):
    """The files of one model.

    Attributes:
        paths: of all of them, in order.
        named: the one that was named: one of them, or the index.
        weight_map: name of a tensor -> name of its file, by the index; empty without one.
        beside: names of other files in the folder that differ from the only one in one number.
        remark: what is said of the files that were read beside the one that was named.
    """

    paths: List[Path]
    named: Path
    weight_map: Mapping[str, str]
    beside: Sequence[str] = ()
    remark: str = ""


def files_of(file: Path, there: Sequence[str], named: bool) -> Files:
    """All files of the model of which a file is one, or which an index names.

    Args:
        file: one of them, or the index.
        there: the names in its folder.
        named: whether the file was named, and not its folder: then an index beside it may name it,
            and otherwise the folder may not hold the numbered files of two models.

    Raises:
        CheckpointError: some are missing, or the index names something else than files beside it.
        DataError: an index that is not JSON.
    """
    if not named:
        _check_one_set(file, there)
    index, weight_map = _index_of(file, there if named else ())
    if index is None:
        paths = _numbered_files(file)
        if len(paths) == 1:
            return Files(paths, file, {}, _beside(file, there))
        remark = f"Read from {len(paths)} files, {paths[0].name} and those that belong to it."
        return Files(paths, file, {}, remark=remark)
    if not weight_map:
        raise PartsError(f"an entry 'weight_map' with names of tensors in {index}", "none")
    names = {*weight_map.values()}
    for name in names:
        # A name with a folder in it could lead anywhere.
        is_path = Path(name).name != name
        if is_path or not os.path.isfile(index.parent / name):
            found = f"{name[:200]!r}, {'a path' if is_path else 'no such file'}"
            raise PartsError(f"the index {index} to name files beside it", found)
    for name in filter(_OF.search, names):
        numbered = {path.name for path in _numbered_files(index.parent / name)}
        if not numbered <= names:
            raise PartsError(
                f"the index {index} to name all {len(numbered)} files of which {name} is one",
                f"no tensor of {listed(sorted(numbered - names))}",
            )
    remark = "" if file == index else f"Read from the files that {index.name} names."
    paths = [index.parent / name for name in sorted(names)]
    return Files(paths, file, weight_map, remark=remark)


def _index_of(file: Path, there: Sequence[str]) -> Tuple[Optional[Path], Dict[str, str]]:
    """The index of the files of which one was named, or that is named, and what it names.

    Returns:
        The path, None if there is none; and name of a tensor -> name of its file, empty where the
        index has no such entry.
    """
    is_index = file.name.endswith(".index.json")
    beside = [file.with_name(name) for name in there if name.endswith(".index.json")]
    for index in [file] if is_index else filter(os.path.isfile, beside):
        try:
            read = read_json_object(index, "the index of a model in several files")
        except DataError:
            if is_index:
                raise
            continue  # which says nothing about this file
        weight_map = read.get("weight_map")
        entries = weight_map.items() if isinstance(weight_map, dict) else ()
        files = {str(name).replace("/", "."): str(path) for name, path in entries}  # as in Stored
        if is_index or (file.name in files.values() and len({*files.values()}) > 1):
            return index, files
    return None, {}


def _numbered_files(file: Path) -> List[Path]:
    """The files ``<number>-of-<count>`` of which ``file`` is one, in order; a whole alone.

    Raises:
        CheckpointError: others are missing.
    """
    numbered = _OF.search(file.name)
    if numbered is None or int(numbered[2]) < 2:
        return [file]
    number, count = numbered.groups()
    names = [
        f"{file.name[: numbered.start(1)]}{part:0{len(number)}}{file.name[numbered.end(1) :]}"
        for part in range(min(int(count), _MOST_FILES) + 1)
    ]
    paths = [file.with_name(name) for name in names]
    paths = paths[:-1] if os.path.isfile(paths[0]) else paths[1:]
    there = list(filter(os.path.isfile, paths))
    if len(there) < int(count):
        raise PartsError(
            f"all of the {int(count)} files of which {file} is one, beside it", f"{len(there)}"
        )
    return there


def joined(files: Files, read: Sequence[Stored]) -> Stored:
    """The model whose files were read one by one.

    transformers, too, loads what the files hold beside what the index names. A tensor that several
    numbered files hold alike is taken once.

    Raises:
        CheckpointError: a file lacks a tensor that the index says it has, or the only file is the
            part of a model that one of several processes has.
    """
    if len(files.paths) == 1 and not files.weight_map:
        check_no_part(files.named)
        # fairseq's own checkpoints have their numbers by epoch and update.
        return replace(read[0], beside=[] if read[0].training else files.beside)
    tensors: Dict[str, Tensor] = {}
    unread: Dict[str, Unread] = {}
    holders: Dict[str, List[int]] = {}
    for number, one in enumerate(read):
        unread.update(one.unread)
        for name in one.tensors:
            holders.setdefault(name, []).append(number)
    names = [path.name for path in files.paths]
    for name, file in files.weight_map.items():
        number = names.index(file)
        if name in read[number].tensors:
            holders[name] = [number]
        elif name not in unread:
            there = f"{len(read[number].tensors)} others"
            wanted = f"the tensor {name} in {files.paths[number]}, as its index says"
            raise PartsError(wanted, there)
    for name, numbers in holders.items():
        first, *others = (read[number].tensors[name] for number in numbers)
        if all(same_values(first, other) for other in others):
            tensors[name] = first
        else:
            unread[name] = Unread(tuple(first.shape), f"each of {len(numbers)} files has a piece")
    places = {name: files.paths[numbers[0]] for name, numbers in holders.items()}
    return replace(
        read[0], tensors=tensors, unread=unread, file=files.named, files=places, remark=files.remark
    )


def _check_one_set(file: Path, there: Sequence[str]) -> None:
    """Refuse the numbered files of several models in one folder, of which the first would be read.

    Raises:
        CheckpointError: others have the same name but for another number of files.
    """
    numbered = _OF.search(file.name)
    if numbered is None:
        return
    around = file.name[: numbered.start()], file.name[numbered.end() :]
    counts = set()
    for name in there:
        other = _OF.search(name)
        if other is not None and (name[: other.start()], name[other.end() :]) == around:
            counts.add(int(other[2]))
    if len(counts) > 1:
        raise PartsError(
            f"the files of one model in {file.parent}, such as {file.name}",
            f"numbered files of {' and of '.join(map(str, sorted(counts)))}",
            "Remove those of the other model, or name a file of the one that is meant.",
        )


def _beside(file: Path, there: Sequence[str]) -> List[str]:
    """The names of files beside one that differ from its name in one number only."""
    parts = re.split(r"(\d+)", file.name)
    found = []
    for name in there:
        others = re.split(r"(\d+)", name)
        differing = [place for place, (a, b) in enumerate(zip(parts, others)) if a != b]
        if len(parts) == len(others) and len(differing) == 1 and differing[0] % 2:
            found.append(name)
    return found
