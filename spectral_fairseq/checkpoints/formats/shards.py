"""A model in several files: with an index, numbered, or one file for each parallel process.

Files are parts of one model where their names, or those of their folders, differ in the number of a
part only: ``model-00001-of-00004.safetensors``, ``consolidated.00.pth`` (Llama),
``mp_rank_00/model_optim_rng.pt`` (Megatron), ``checkpoint_best-model_part-0.pt`` (fairseq).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Mapping, Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.checkpoints.formats.json_file import read_json_object
from spectral_fairseq.checkpoints.table_uses import may_be_table
from spectral_fairseq.checkpoints.tables import Unread
from spectral_fairseq.errors import CheckpointError
from spectral_fairseq.files import why_not_readable

_OF = re.compile(r"(\d+)[-_]of[-_](\d+)")
# A word for a part, and its number; Megatron adds a second one for the stage of a pipeline.
_PART = re.compile(
    r"(?<![a-z])(consolidated|(?:zero_pp_|mp_|tp_|pp_)?rank|(?:model_)?part|shard|tp|mp)"
    r"([-_.]?)(\d+(?:_\d+)?)(?![\da-z])",
    re.IGNORECASE,
)
# Those that number from 0 and say by it that there are others: rank-8 may be a model's own name.
_FROM_ZERO = ("consolidated", "model_part", "mp_rank", "tp_rank")
_MOST_PARTS = 10_000


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
        weight_map = read_json_object(index, "the index of a model in several files").get(
            "weight_map"
        )
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(
                f"an entry 'weight_map' with the names of tensors in {index}",
                "none",
                "Copy the index again, or name one of the files that hold the tensors.",
            )
        for file in {str(name) for name in weight_map.values()}:
            self._check(file)
        self._files: Dict[str, str] = {str(name): str(file) for name, file in weight_map.items()}

    def _check(self, file: str) -> None:
        # A name with a folder in it could lead anywhere.
        obstacle = "a path" if Path(file).name != file else None
        obstacle = obstacle or why_not_readable(self._index.parent / file)
        if obstacle is not None:
            raise CheckpointError(
                f"the index {self._index} to name files beside it",
                f"{file[:200]!r}, {obstacle}",
                "Copy the whole folder again.",
            )

    def leave_out_unread(self) -> Dict[str, Unread]:
        """Open all files, and keep only the names of tensors that can be read.

        Returns:
            Name -> what cannot be read.
        """
        for name, file in list(self._files.items()):
            if file not in self._opened:
                self._opened[file], unread = self._read(self._index.parent / file)
                self._unread.update(unread)
            if name in self._unread:
                del self._files[name]
        return self._unread

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor, or the first tensor of a module."""
        held = [
            file
            for key, file in self._files.items()
            if key == name or key.rpartition(".")[0] == name
        ]
        return self._index.parent / held[0]

    def __getitem__(self, name: str) -> Tensor:
        file = self._files[name]
        if file not in self._opened:
            self._opened[file], _ = self._read(self._index.parent / file)
        if name not in self._opened[file]:
            raise CheckpointError(
                f"the tensor {name} in {self._index.parent / file}, as its index says",
                f"{len(self._opened[file])} others",
                "The files do not belong together: copy the whole folder again.",
            )
        return self._opened[file][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def parts_of(file: Path) -> List[Path]:
    """The files of which ``file`` is one, in their order; ``file`` alone if it is a whole.

    Args:
        file: as it was named.

    Raises:
        CheckpointError: other files of the same model are missing.
    """
    found = _OF.search(file.name)
    if found is not None:
        return _numbered_of(file, found)
    by_folder = not _PART.search(file.name)
    place = file.parent if by_folder else file
    # Folders such as rank_1 and rank_2 may be those of trainings; Megatron's are called otherwise.
    if not _PART.search(place.name) or (by_folder and not _counts_from_zero(place.name)):
        return [file]
    numbers = _part_numbers(place.name)
    siblings = {}
    for other in _entries(place.absolute().parent):
        path = place.with_name(other) / file.name if by_folder else place.with_name(other)
        if _pattern(other) == _pattern(place.name) and why_not_readable(path) is None:
            siblings[_part_numbers(other)] = path
    axes = [sorted({number[axis] for number in siblings}) for axis in range(len(numbers))]
    if max(axis[0] for axis in axes) > 1 and len(siblings) > 1:
        return [file]  # of any other numbering, such as one by size
    whole = 1
    for axis in axes:
        whole *= axis[-1] + 1 - (axis[0] == 1 and len(axis) > 1)
    if len(siblings) == 1 and not (_counts_from_zero(place.name) and any(numbers)):
        return [file]
    if len(siblings) < whole:
        raise _incomplete(file, len(siblings), f"at least {whole}")
    return [siblings[number] for number in sorted(siblings)]


def _numbered_of(file: Path, found: re.Match[str]) -> List[Path]:
    number, count = found.groups()
    if int(count) < 2:
        return [file]
    names = [
        f"{file.name[: found.start(1)]}{one:0{len(number)}}{file.name[found.end(1) :]}"
        for one in range(min(int(count), _MOST_PARTS) + 1)
    ]
    paths = [file.with_name(name) for name in names]
    paths = paths[:-1] if why_not_readable(paths[0]) is None else paths[1:]
    there = [path for path in paths if why_not_readable(path) is None]
    if len(there) < int(count):
        raise _incomplete(file, len(there), count)
    return there


def _incomplete(file: Path, there: int, count: str) -> CheckpointError:
    return CheckpointError(
        f"all of the {count} files of which {file} is one, beside it",
        f"{there}",
        "Copy the others to the same folder. If the file is a whole model, rename it.",
    )


def _entries(folder: Path) -> List[str]:
    try:
        return [one.name for one in folder.iterdir()]
    except OSError:  # the files of such a folder can be read, but not listed
        return []


def _pattern(name: str) -> str:
    return _PART.sub(lambda part: f"{part[1]}{part[2]}#", name)


def _part_numbers(name: str) -> Tuple[int, ...]:
    return tuple(int(one) for _, _, part in _PART.findall(name) for one in part.split("_"))


def check_declared(file: Path, files: Sequence[Path], declared: int) -> None:
    """Refuse one file of a model of which the settings say that it is in several.

    Args:
        file: as it was named.
        files: of :func:`parts_of`.
        declared: the number of files that the settings in the file give.

    Raises:
        CheckpointError: fewer files are there.
    """
    if len(files) < declared:
        raise _incomplete(file, len(files), str(declared))


def joined(
    files: Sequence[Path], tensors: Sequence[Mapping[str, Tensor]]
) -> Tuple[Dict[str, Tensor], Dict[str, Unread], Dict[str, List[Path]]]:
    """The tensors of all parts of a model.

    A tensor that one file holds, or several alike, is taken as it is. Where the files of parallel
    processes hold pieces of a table, its rows or its columns are put together in their order: rows
    where the pieces are as wide as the vectors that all files share (those of the norms), columns
    where all pieces together are.

    Args:
        files: of :func:`parts_of`.
        tensors: of each file.

    Returns:
        Name -> tensor; name -> why it cannot be read, for those of which each file holds a piece
        that is not put together; and name -> its files.
    """
    holders: Dict[str, List[int]] = {}
    for number, one in enumerate(tensors):
        for name in one:
            holders.setdefault(name, []).append(number)
    whole: Dict[str, Tensor] = {}
    unread: Dict[str, Unread] = {}
    pieces: Dict[str, List[Tensor]] = {}
    for name, numbers in holders.items():
        found = [tensors[number][name] for number in numbers]
        # Matrices that are no tables are of no use here, and need not be read.
        compared = found[0].dim() < 2 or may_be_table(_module(name), *_matrix(found[0]))
        if len(found) == 1 or (compared and all(_equal(found[0], one) for one in found[1:])):
            whole[name] = found[0]
        elif compared and found[0].dim() == 2 and _known_layout(files):
            pieces[name] = found
        else:
            unread[name] = Unread(tuple(found[0].shape), f"each of {len(found)} files has a piece")
    widths = {len(one) for name, one in whole.items() if one.dim() == 1 and len(holders[name]) > 1}
    for name, found in pieces.items():
        columns = {one.size(1) for one in found}
        if len(columns) == 1 and columns <= widths:
            whole[name] = torch.cat(found)
        elif sum(one.size(1) for one in found) in widths and len({len(one) for one in found}) == 1:
            whole[name] = torch.cat(found, 1)
        else:
            unread[name] = Unread(
                tuple(found[0].shape),
                f"each of {len(found)} files has a piece, and nothing says how they fit together",
            )
    return whole, unread, {k: [files[number] for number in v] for k, v in holders.items()}


def _module(name: str) -> str:
    return name[: -len(".weight")] if name.endswith(".weight") else name


def _matrix(tensor: Tensor) -> Tuple[int, int]:
    return (tensor.size(0), tensor.size(1)) if tensor.dim() == 2 else (0, 0)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def _counts_from_zero(name: str) -> bool:
    return any(word.lower() in _FROM_ZERO for word, *_ in _PART.findall(name))


def _known_layout(files: Sequence[Path]) -> bool:
    """Whether the files are those of Llama, Megatron, fairseq or DeepSpeed."""
    return _counts_from_zero(f"{files[0].parent.name}/{files[0].name}")
