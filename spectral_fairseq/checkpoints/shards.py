"""A model in several files: with an index or numbered; parts of tables are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

from torch import Tensor

from spectral_fairseq.checkpoints.reading import Unread, read_json_object
from spectral_fairseq.checkpoints.table_entries import may_hold_table
from spectral_fairseq.errors import CheckpointError, DataError, PartsError, listed
from spectral_fairseq.files import names_in, why_not_readable
from spectral_fairseq.functional.row_blocks import same_values

# In numbered files, as model-00001-of-00004.safetensors, each holds other tensors of one model.
_OF = re.compile(r"(\d+)[-_]of[-_](\d+)")
_MOST_PARTS = 10_000
# Parallel processes hold a piece of each table. The names of their files or folders have a word for
# it and a number: consolidated.00.pth (Llama), mp_rank_00_001 (Megatron, DeepSpeed),
# checkpoint_best-model_part-0.pt (fairseq).
_PART = re.compile(
    r"(?<![a-z])(consolidated|(?:zero_pp_|mp_|tp_|pp_)?rank|(?:model_)?part|shard|tp|mp|gpu)"
    r"([-_.]?)(\d+(?:_\d+)?)(?![\da-z])",
    re.IGNORECASE,
)
# Those that number from 0 and say by it that there are others: rank-8 may be a model's own name.
_FROM_ZERO = ("consolidated", "model_part", "mp_rank", "tp_rank")
# A layer of a pipeline of DeepSpeed, which has a file for each.
_ONE_LAYER = re.compile(r"layer_\d+-model_\d+-model_states")


class Shards(Mapping[str, Tensor]):
    """Name -> tensor, read from the file that the index names, which is opened when it is used.

    Args:
        index: a file such as ``model.safetensors.index.json``.
        read: opens one of the files: name -> tensor, and name -> what cannot be read as one.

    Raises:
        CheckpointError: the index names something else than files beside it.
        DataError: it is not JSON.
    """

    def __init__(
        self,
        index: Path,
        read: Callable[[Path], Tuple[Mapping[str, Tensor], Mapping[str, Unread]]],
    ) -> None:
        self._index = index
        self._read = read
        self._opened: Dict[str, Mapping[str, Tensor]] = {}
        self._unread: Dict[str, Unread] = {}
        self._turned: Set[str] = set()
        self._files = _weight_map(index)
        if not self._files:
            raise PartsError(f"an entry 'weight_map' with names of tensors in {index}", "none")
        files = {*self._files.values()}
        for file in files:
            self._check(file)
        for file in filter(_OF.search, files):
            there = {path.name for path in numbered_files(index.parent / file)}
            if not there <= files:
                raise PartsError(
                    f"the index {index} to name all {len(there)} files of which {file} is one",
                    f"no tensor of {listed(sorted(there - files))}",
                )

    def _check(self, file: str) -> None:
        # A name with a folder in it could lead anywhere.
        obstacle = "a path" if Path(file).name != file else None
        obstacle = obstacle or why_not_readable(self._index.parent / file)
        if obstacle is not None:
            name = f"{file[:200]!r}, {obstacle}"
            raise PartsError(f"the index {self._index} to name files beside it", name)

    def leave_out_unread(self) -> Dict[str, Unread]:
        """Open all files, keep only the names of tensors that can be read, return the others."""
        for name, file in list(self._files.items()):
            if file not in self._opened:
                self._opened[file], unread = self._read(self._index.parent / file)
                self._unread.update(unread)
                # transformers, too, loads what the files hold beside what the index names.
                for other in self._opened[file]:
                    self._files.setdefault(other, file)
            if name in self._unread:
                del self._files[name]
        return self._unread

    def turn(self, names: Sequence[str]) -> None:
        """Transpose some of the tensors when they are read."""
        self._turned.update(names)

    @property
    def files(self) -> Dict[str, List[Path]]:
        """Name of a tensor -> its file, as of a model in numbered parts."""
        return {name: [self._index.parent / file] for name, file in self._files.items()}

    def __getitem__(self, name: str) -> Tensor:
        file = self._files[name]
        if file not in self._opened:
            self._opened[file], _ = self._read(self._index.parent / file)
        if name not in self._opened[file]:
            place, there = self._index.parent / file, f"{len(self._opened[file])} others"
            raise PartsError(f"the tensor {name} in {place}, as its index says", there)
        tensor = self._opened[file][name]
        return tensor.t() if name in self._turned else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _weight_map(index: Path) -> Dict[str, str]:
    """Name of a tensor -> name of its file; empty where the index has no such entry."""
    weight_map = read_json_object(index, "the index of a model in several files").get("weight_map")
    named = weight_map if isinstance(weight_map, dict) else {}
    return {str(name): str(file) for name, file in named.items()}


def numbered_files(file: Path) -> List[Path]:
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
        for part in range(min(int(count), _MOST_PARTS) + 1)
    ]
    paths = [file.with_name(name) for name in names]
    paths = paths[:-1] if why_not_readable(paths[0]) is None else paths[1:]
    there = [path for path in paths if why_not_readable(path) is None]
    if len(there) < int(count):
        raise PartsError(
            f"all of the {int(count)} files of which {file} is one, beside it", f"{len(there)}"
        )
    return there


def check_one_set(file: Path) -> None:
    """Refuse the numbered files of several models in one folder, of which the first would be read.

    Raises:
        CheckpointError: others have the same name but for another number of files.
    """
    numbered = _OF.search(file.name)
    if numbered is None:
        return
    around = file.name[: numbered.start()], file.name[numbered.end() :]
    counts = set()
    for name in names_in(file.absolute().parent):
        other = _OF.search(name)
        if other is not None and (name[: other.start()], name[other.end() :]) == around:
            counts.add(int(other[2]))
    if len(counts) > 1:
        raise PartsError(
            f"the files of one model in {file.parent}, such as {file.name}",
            f"numbered files of {' and of '.join(map(str, sorted(counts)))}",
            "Remove those of the other model, or name a file of the one that is meant.",
        )


def index_beside(file: Path) -> Optional[Path]:
    """The index beside a file that names it as one of several; ``None`` if there is none."""
    for name in names_in(file.absolute().parent):
        index = file.with_name(name)
        if not name.endswith(".index.json") or why_not_readable(index) is not None:
            continue
        try:
            files = {*_weight_map(index).values()}
        except DataError:  # which says nothing about this file
            continue
        if file.name in files and len(files) > 1:
            return index
    return None


def check_no_part(file: Path, declared: int) -> None:
    """Refuse what one of several parallel processes saved, of which no table need be whole.

    Args:
        file: whose name, or that of its folder, may number the processes.
        declared: the number of processes by the settings in it.

    Raises:
        CheckpointError: by its name, those beside it or its settings it is one of several.
    """
    why = f"one of {declared} parts, by its settings" if declared > 1 else _part_by_name(file)
    if why:
        raise CheckpointError(
            f"a whole model in {file}",
            why,
            "Put the parts together with the converter of the program that wrote them "
            "(transformers has one for Llama, Megatron-LM its own). If the file holds whole "
            "tables, give it alone under another name.",
        )


def _part_by_name(file: Path) -> str:
    if _ONE_LAYER.match(file.name):
        return "one layer of a pipeline, by its name"
    place = file if _PART.search(file.name) else file.parent
    words = {word.lower() for word, *_ in _PART.findall(place.name)}
    from_zero = not words.isdisjoint(_FROM_ZERO)
    # Folders such as rank_1 and rank_2 may be those of trainings; Megatron's are called otherwise.
    if not words or (place is not file and not from_zero):
        return ""
    several = [
        _part_numbers(name)
        for name in names_in(place.absolute().parent)
        if _pattern(name) == _pattern(place.name)
    ]
    # Any other numbering, such as one by size, begins elsewhere.
    lowest = max(map(min, zip(*several)), default=0)
    if len(several) > 1 and lowest < 2:
        return f"one of {len(several)} parts, by the names beside {place.name}"
    is_first = not any(_part_numbers(place.name))
    return "" if is_first or not from_zero else f"a part that {place.name} numbers"


def _pattern(name: str) -> str:
    return _PART.sub(lambda part: f"{part[1]}{part[2]}#", name)


def _part_numbers(name: str) -> Tuple[int, ...]:
    return tuple(int(digits) for _, _, part in _PART.findall(name) for digits in part.split("_"))


def check_same_part(paths: Sequence[Path]) -> None:
    """Refuse files of several parallel processes where one model of several times is meant.

    Raises:
        CheckpointError: their names have different numbers of a part.
    """
    for path in paths[1:]:
        if _part_numbers(path.name) != _part_numbers(paths[0].name):
            raise CheckpointError(
                f"checkpoints of the same part of a model as {paths[0].name}",
                f"{path.name}, which another process saved",
                "Name the checkpoints of one process, and treat each process alike.",
            )


def joined(
    files: Sequence[Path], tensors: Sequence[Mapping[str, Tensor]]
) -> Tuple[Dict[str, Tensor], Dict[str, Unread], Dict[str, List[Path]]]:
    """The tensors of all numbered files; one that several files hold alike is taken once.

    Returns:
        Name -> tensor; name -> why it cannot be read, for those of which each file holds a piece;
        and name -> its files.
    """
    holders: Dict[str, List[int]] = {}
    for number, part in enumerate(tensors):
        for name in part:
            holders.setdefault(name, []).append(number)
    whole: Dict[str, Tensor] = {}
    unread: Dict[str, Unread] = {}
    for name, numbers in holders.items():
        first, *others = (tensors[number][name] for number in numbers)
        # Matrices that are no tables are of no use here, and need not be read.
        compared = first.dim() < 2 or may_hold_table(name, first.shape)
        if not others or (compared and all(same_values(first, other) for other in others)):
            whole[name] = first
        else:
            unread[name] = Unread(tuple(first.shape), f"each of {len(numbers)} files has a piece")
    return whole, unread, {k: [files[number] for number in v] for k, v in holders.items()}
