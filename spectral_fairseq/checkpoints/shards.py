"""A model in several files, or with a table in pieces: its tensors, put together."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor

from spectral_fairseq.checkpoints.reading import Unread, read_json_object
from spectral_fairseq.checkpoints.settings import same_values
from spectral_fairseq.checkpoints.table_entries import may_hold_table
from spectral_fairseq.errors import CheckpointError, DataError, PartsError, listed
from spectral_fairseq.files import names_in, why_not_readable

# A model in several files: with an index, numbered, or one file for each parallel process.
#
# Files are parts of one model where their names, or those of their folders, differ in the number of
# a part only: ``model-00001-of-00004.safetensors``, ``consolidated.00.pth`` (Llama),
# ``mp_rank_00/model_optim_rng.pt`` (Megatron), ``checkpoint_best-model_part-0.pt`` (fairseq).


_OF = re.compile(r"(\d+)[-_]of[-_](\d+)")
# A word for a part, and its number; Megatron adds a second one for the stage of a pipeline.
_PART = re.compile(
    r"(?<![a-z])(consolidated|(?:zero_pp_|mp_|tp_|pp_)?rank|(?:model_)?part|shard|tp|mp"
    r"|(?<=\d-)model(?=_\d+-model_states))"  # layer_00-model_01-model_states.pt of DeepSpeed
    r"([-_.]?)(\d+(?:_\d+)?)(?![\da-z])",
    re.IGNORECASE,
)
# Those that number from 0 and say by it that there are others: rank-8 may be a model's own name.
_FROM_ZERO = ("consolidated", "model", "model_part", "mp_rank", "tp_rank")
_MOST_PARTS = 10_000
# Unrelated rows are sqrt(2) of their length apart, and 0.4 in a cone of mean cosine 0.9.
_UNLIKE, _COMPARED_ROWS = 0.3, 4096


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
            there = {path.name for path in parts_of(index.parent / file)}
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


def parts_of(file: Path) -> List[Path]:
    """The files of which ``file`` is one, in their order; ``file`` alone if it is a whole.

    Raises:
        CheckpointError: other files of the same model are missing.
    """
    numbered = _OF.search(file.name)
    if numbered is not None:
        return _numbered_of(file, numbered)
    by_folder = not _PART.search(file.name)
    place = file.parent if by_folder else file
    # Folders such as rank_1 and rank_2 may be those of trainings; Megatron's are called otherwise.
    if not _PART.search(place.name) or (by_folder and not _counts_from_zero(place.name)):
        return [file]
    numbers = _part_numbers(place.name)
    siblings = {}
    for other in names_in(place.absolute().parent):
        path = place.with_name(other) / file.name if by_folder else place.with_name(other)
        if _pattern(other) == _pattern(place.name) and why_not_readable(path) is None:
            siblings[_part_numbers(other)] = path
    axes = [sorted({number[axis] for number in siblings}) for axis in range(len(numbers))]
    if max(axis[0] for axis in axes) > 1 and len(siblings) > 1:
        return [file]  # of any other numbering, such as one by size
    whole = math.prod(axis[-1] + 1 - (axis[0] == 1 and len(axis) > 1) for axis in axes)
    if len(siblings) == 1 and not (_counts_from_zero(place.name) and any(numbers)):
        return [file]
    if len(siblings) < whole:
        raise _incomplete(file, len(siblings), f"at least {whole}")
    return [siblings[number] for number in sorted(siblings)]


def _numbered_of(file: Path, numbered: re.Match[str]) -> List[Path]:
    number, count = numbered.groups()
    if int(count) < 2:
        return [file]
    names = [
        f"{file.name[: numbered.start(1)]}{part:0{len(number)}}{file.name[numbered.end(1) :]}"
        for part in range(min(int(count), _MOST_PARTS) + 1)
    ]
    paths = [file.with_name(name) for name in names]
    paths = paths[:-1] if why_not_readable(paths[0]) is None else paths[1:]
    there = [path for path in paths if why_not_readable(path) is None]
    if len(there) < int(count):
        raise _incomplete(file, len(there), str(int(count)))
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


def neighbours(file: Path) -> List[Path]:
    """The files beside one whose names differ from its name in one number only."""
    beside = []
    for name in names_in(file.absolute().parent):
        parts, other_parts = (re.split(r"(\d+)", text) for text in (file.name, name))
        differing = [place for place, (a, b) in enumerate(zip(parts, other_parts)) if a != b]
        if len(parts) == len(other_parts) and len(differing) == 1 and differing[0] % 2:
            beside.append(file.with_name(name))
    return beside


def check_no_rank(file: Path, tensors: Mapping[str, Tensor], beside: Mapping[str, Tensor]) -> None:
    """Refuse one of the files of parallel processes whose names have no word for it.

    They hold the same names, the same vectors, such as those of the norms, and other rows or
    columns of the tables. Two checkpoints of a training have other vectors as well, or, where only
    the table is trained, tables whose rows are alike.

    Raises:
        CheckpointError: the two hold parts of one model.
    """
    if {*tensors} != {*beside}:
        return
    vectors = [
        name for name, tensor in tensors.items() if tensor.dim() == 1 and tensor.is_floating_point()
    ]
    tables = [name for name, tensor in tensors.items() if may_hold_table(name, tensor.shape)]
    if not vectors or not all(same_values(tensors[name], beside[name]) for name in vectors):
        return
    unlike = [name for name in tables if _are_unlike(tensors[name], beside[name])]
    if tables and len(unlike) == len(tables):
        raise PartsError(
            f"a whole model in {file}",
            f"the names and vectors of a file beside it, and other numbers in {tables[0]}, as "
            "parallel processes save them",
            "Put the parts together in one file; if it is a whole model, move it away.",
        )


def _are_unlike(table: Tensor, other: Tensor) -> bool:
    """Whether two tables hold other words, judged by their first rows."""
    if table.shape != other.shape or not table.is_floating_point():
        return table.shape != other.shape
    first, second = (rows[:_COMPARED_ROWS].double() for rows in (table, other))
    return float((first - second).norm()) > _UNLIKE * float(first.norm())


def _incomplete(file: Path, there: int, count: str) -> CheckpointError:
    expected = f"all of the {count} files of which {file} is one, beside it"
    return PartsError(expected, f"{there}")


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


def check_declared(file: Path, files: Sequence[Path], declared: int) -> None:
    """Refuse one file of a model of which the settings say that it is in several."""
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

    Returns:
        Name -> tensor; name -> why it cannot be read, for those of which each file holds a piece
        that is not put together; and name -> its files.
    """
    holders: Dict[str, List[int]] = {}
    for number, part in enumerate(tensors):
        for name in part:
            holders.setdefault(name, []).append(number)
    whole: Dict[str, Tensor] = {}
    unread: Dict[str, Unread] = {}
    pieces: Dict[str, List[Tensor]] = {}
    # Those of Llama, Megatron, fairseq or DeepSpeed.
    known_layout = _counts_from_zero(f"{files[0].parent.name}/{files[0].name}")
    for name, numbers in holders.items():
        parts = [tensors[number][name] for number in numbers]
        # Matrices that are no tables are of no use here, and need not be read.
        compared = parts[0].dim() < 2 or may_hold_table(name, parts[0].shape)
        if len(parts) == 1 or (compared and all(same_values(parts[0], part) for part in parts[1:])):
            whole[name] = parts[0]
        elif compared and parts[0].dim() == 2 and known_layout:
            pieces[name] = parts
        else:
            unread[name] = Unread(tuple(parts[0].shape), f"each of {len(parts)} files has a piece")
    widths = {
        len(part) for name, part in whole.items() if part.dim() == 1 and len(holders[name]) > 1
    }
    for name, parts in pieces.items():
        columns = {part.size(1) for part in parts}
        if len(columns) == 1 and columns <= widths:
            whole[name] = torch.cat(parts)
        elif (
            sum(part.size(1) for part in parts) in widths
            and len({len(part) for part in parts}) == 1
        ):
            whole[name] = torch.cat(parts, 1)
        else:
            unread[name] = Unread(
                tuple(parts[0].shape),
                f"each of {len(parts)} files has a piece, and nothing says how they fit together",
            )
    return whole, unread, {k: [files[number] for number in v] for k, v in holders.items()}


def _counts_from_zero(name: str) -> bool:
    return any(word.lower() in _FROM_ZERO for word, *_ in _PART.findall(name))


# model2vec stores the centre of a cluster of tokens once, and each token's cluster.


def without_clusters(
    tensors: Mapping[str, Tensor], unread: Mapping[str, Unread]
) -> Tuple[Mapping[str, Tensor], Mapping[str, Unread], str]:
    """The same two with a row for each token in place of clusters, and what is said about it."""
    if not ("embeddings" in tensors and "mapping" in tensors):
        return tensors, unread, ""
    centres, mapping = tensors["embeddings"], tensors["mapping"]
    others = {k: v for k, v in tensors.items() if k not in ("embeddings", "mapping")}
    table = _expanded(centres, mapping, others.get("weights"))
    if table is None:
        why = "centres of clusters, with a mapping of tokens to them that does not fit"
        return others, {**unread, "embeddings": Unread(tuple(centres.shape), why)}, ""
    others["embeddings"] = table
    said = f"Its rows are the {len(centres)} stored ones, repeated by mapping"
    return others, unread, said + (" and scaled by weights." if "weights" in others else ".")


def _expanded(centres: Tensor, mapping: Tensor, weights: Optional[Tensor]) -> Optional[Tensor]:
    """The vector of each token, shape (N, d); None if the mapping names other rows than there are.

    Args:
        centres: shape (C, d).
        mapping: the row of each token in ``centres``, shape (N,).
        weights: a factor for each token, shape (N,), if there are any.
    """
    whole = not (mapping.is_floating_point() or mapping.is_complex()) and mapping.dim() == 1
    if not whole or centres.dim() != 2 or not mapping.numel():
        return None
    mapping = mapping.long().clone()  # torch 1.12 faults on numbers that are not aligned
    if int(mapping.min()) < 0 or int(mapping.max()) >= len(centres):
        return None
    rows = centres[mapping]
    if weights is None or not rows.is_floating_point():  # whole numbers are refused later
        return rows
    if weights.shape != mapping.shape:
        return None
    return rows * weights.to(rows.dtype).unsqueeze(1)
