"""What every format is read into: tensors that are read when they are used, and what is known."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor

from spectral_fairseq.checkpoints.dictionary import WordList
from spectral_fairseq.checkpoints.reading import Unread, read_json_object
from spectral_fairseq.checkpoints.table_names import (
    adapted,
    has_output,
    has_output_beside,
    is_in_pieces,
    is_output_entry,
    may_be_table,
    output_tables,
)
from spectral_fairseq.checkpoints.tables import (
    only_matrix,
    parts_of_outputs,
    table_shape,
    turned_outputs,
    unread_outputs,
)
from spectral_fairseq.errors import CheckpointError, DataError
from spectral_fairseq.files import why_not_readable

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
        for file in set(self._files.values()):
            found = _OF.search(file)
            there = {*map(str, parts_of(index.parent / file))} if found is not None else set()
            missing = there - {str(index.parent / one) for one in self._files.values()}
            if missing:
                raise CheckpointError(
                    f"the index {index} to name all of the {len(there)} files of which {file} is "
                    "one",
                    f"no tensor of {', '.join(Path(one).name for one in sorted(missing)[:4])}",
                    "The files do not belong together: copy the whole folder again.",
                )

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
        found = self._opened[file][name]
        return found.t() if name in self._turned else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def parts_of(file: Path) -> List[Path]:
    """The files of which ``file`` is one, in their order; ``file`` alone if it is a whole.

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
        raise _incomplete(file, len(there), str(int(count)))
    return there


def check_one_set(file: Path) -> None:
    """Refuse the numbered files of several models in one folder, of which the first would be read.

    Args:
        file: one of them, which was found in a folder.

    Raises:
        CheckpointError: others have the same name but for another number of files.
    """
    found = _OF.search(file.name)
    if found is None:
        return
    around = file.name[: found.start()], file.name[found.end() :]
    counts = set()
    for name in _entries(file.absolute().parent):
        other = _OF.search(name)
        if other is not None and (name[: other.start()], name[other.end() :]) == around:
            counts.add(int(other[2]))
    if len(counts) > 1:
        raise CheckpointError(
            f"the files of one model in {file.parent}, such as {file.name}",
            f"numbered files of {' and of '.join(map(str, sorted(counts)))}",
            "Remove those of the other model, or name a file of the one that is meant.",
        )


def index_beside(file: Path) -> Optional[Path]:
    """The index beside a file that names it as one of several; ``None`` if there is none."""
    for name in sorted(_entries(file.absolute().parent)):
        index = file.with_name(name)
        if not name.endswith(".index.json") or why_not_readable(index) is not None:
            continue
        try:
            named = read_json_object(index, "the index of a model in several files")
        except DataError:  # which says nothing about this file
            continue
        weight_map = named.get("weight_map")
        files = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
        if file.name in files and len(files) > 1:
            return index
    return None


def neighbours(file: Path) -> List[Path]:
    """The files beside one whose names differ from its name in one number only."""
    found = []
    for name in sorted(_entries(file.absolute().parent)):
        own, other = (re.split(r"(\d+)", one) for one in (file.name, name))
        differing = [place for place, (a, b) in enumerate(zip(own, other)) if a != b]
        if len(own) == len(other) and len(differing) == 1 and differing[0] % 2:
            found.append(file.with_name(name))
    return found


def check_no_rank(file: Path, own: Mapping[str, Tensor], beside: Mapping[str, Tensor]) -> None:
    """Refuse one of the files of parallel processes whose names have no word for it.

    They hold the same names, the same vectors, such as those of the norms, and other rows or
    columns of the tables. Two checkpoints of a training have other vectors as well.

    Args:
        file: that was named.
        own: its tensors.
        beside: those of a file whose name differs in a number only.

    Raises:
        CheckpointError: the two hold parts of one model.
    """
    if {*own} != {*beside}:
        return
    vectors = [name for name, one in own.items() if one.dim() == 1 and one.is_floating_point()]
    tables = [name for name, one in own.items() if may_be_table(_module(name), *_matrix(one))]
    if not vectors or not all(_equal(own[name], beside[name]) for name in vectors):
        return
    if tables and not any(_equal(own[name], beside[name]) for name in tables):
        raise CheckpointError(
            f"a whole model in {file}",
            "the same names and vectors as in a file beside it whose name has another number, and "
            f"other numbers in {tables[0]}, as parallel processes save them",
            "Put the parts together in one file. If each is a whole model, move it to a folder of "
            "its own.",
        )


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


WordFinder = Callable[[str, int], Tuple[Optional[WordList], str]]


def _no_words(table: str, rows: int) -> Tuple[Optional[WordList], str]:
    del table, rows
    return None, "none given, and the model stores no words"


@dataclass
class OpenedModel:
    """A model that was opened.

    Attributes:
        name: what it is called in messages, usually its path.
        tensors: name -> tensor, mapped from the file where its format allows that.
        path: the file or folder, as it was named; None for a model in memory.
        weights: the file that holds the tensors, or the index of several.
        default_table: the table to measure where no name is known.
        find_words: (table, number of its rows) -> its words, or None, and a remark on the choice.
        uncounted: rows that stand for no word, where the words are not known.
        arch: name of the architecture, if it is known.
        epoch: epoch of the training, if it is known.
        updates: updates of the training, if they are known.
        checkpoint: a fairseq checkpoint without its model; empty for others.
        unread: name -> further arrays, which cannot be read as tables.
        settings: of the model, as its config.json or params.json gives them.
        declared_parts: in how many files the model is, by the settings in this one.
        files: name of a tensor -> the files that hold it, of a model in numbered parts.
        remark: what is said about the tensors beside the choice of a table.
        turned: names of output layers that are stored as d x N, and are N x d in ``tensors``.
    """

    name: str
    tensors: Mapping[str, Tensor]
    path: Optional[Path] = None
    weights: Optional[Path] = None
    default_table: Optional[str] = None
    find_words: WordFinder = _no_words
    uncounted: List[int] = field(default_factory=list)
    arch: Optional[str] = None
    epoch: Optional[int] = None
    updates: Optional[int] = None
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    unread: Mapping[str, Unread] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    declared_parts: int = 1
    files: Mapping[str, List[Path]] = field(default_factory=dict)
    remark: str = ""
    turned: List[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # model2vec stores the centre of a cluster of tokens once, and each token's cluster.
        if "embeddings" in self.tensors and "mapping" in self.tensors:
            centres, mapping = self.tensors["embeddings"], self.tensors["mapping"]
            others = {k: v for k, v in self.tensors.items() if k not in ("embeddings", "mapping")}
            table = _expanded(centres, mapping, others.get("weights"))
            if table is None:
                why = "centres of clusters, with a mapping of tokens to them that does not fit"
                self.unread = {**self.unread, "embeddings": Unread(tuple(centres.shape), why)}
            else:
                others["embeddings"] = table
                said = f"Its rows are the {len(centres)} stored ones, repeated by mapping"
                said += " and scaled by weights." if "weights" in others else "."
                self.remark = f"{self.remark} {said}".strip()
            self.tensors = others
        self._turn_outputs()

    def _turn_outputs(self) -> None:
        self.turned = turned_outputs(self.tensors, self.vocabulary_sizes())
        if isinstance(self.tensors, Shards):
            self.tensors.turn(self.turned)
        elif self.turned:
            rest = {key: one.t() for key, one in self.tensors.items() if key in self.turned}
            self.tensors = {**self.tensors, **rest}

    def file_of(self, table: str) -> Optional[Path]:
        """The file that holds a table, the first of several; None for a model in memory."""
        return self.files_of(table)[0] if self.weights is not None else None

    def files_of(self, table: str) -> List[Path]:
        """The files that hold a table; none for a model in memory."""
        if isinstance(self.tensors, Shards):
            return [self.tensors.file_of(table)]
        if self.files:
            key = next(k for k in self.files if k == table or k.rpartition(".")[0] == table)
            return self.files[key]
        return [] if self.weights is None else [self.weights]

    def unread_of(self, rows: int) -> List[str]:
        """Some matrices that cannot be read, of as many rows as a table or more."""
        found = [k for k, v in self.unread.items() if len(v.shape) == 2 and v.shape[0] >= rows]
        return found[:4]

    def vocabulary_sizes(self) -> List[int]:
        """The numbers of words that the settings give, of each vocabulary one."""
        return sorted(set(_sizes(self.settings)))

    @property
    def is_one_layer(self) -> bool:
        """Whether the file holds one layer of a model, as those of DeepSpeed's pipeline do."""
        return self.weights is not None and bool(_ONE_LAYER.match(self.weights.name))

    @property
    def untied(self) -> bool:
        """Whether the settings say that the output layer does not share the input's table."""
        return text_settings(self.settings).get("tie_word_embeddings") is False

    @property
    def tied(self) -> bool:
        """Whether the settings say that the output layer shares the input's table.

        config.json leaves ``tie_word_embeddings`` out where it has its default, which is true for
        the models that write words.
        """
        given = text_settings(self.settings).get("tie_word_embeddings")
        classes = self.settings.get("architectures")
        writes = isinstance(classes, list) and any(
            str(one).endswith(_WRITES_WORDS) for one in classes
        )
        return given is True or (given is None and writes)


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


def _sizes(settings: Mapping[str, Any], depth: int = 3) -> Iterator[int]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and depth:
            yield from _sizes(value, depth - 1)
        elif str(name).endswith("vocab_size") and type(value) is int and value > 0:
            yield value


# How transformers names its models with an output layer over words.
_WRITES_WORDS = ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration")


def text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the part of a model that has the words, with those of the whole before it."""
    inner = next(
        (one for one in map(settings.get, ("text_config", "decoder")) if isinstance(one, Mapping)),
        {},
    )
    return {**inner, **{name: value for name, value in settings.items() if value is not None}}


def padding_rows(settings: Mapping[str, Any]) -> List[int]:
    """The row of the padding symbol, unless the symbol has another meaning as well."""
    settings = text_settings(settings)
    row = settings.get("pad_token_id")
    others: List[Any] = []
    for name in ("bos_token_id", "eos_token_id", "unk_token_id"):
        other = settings.get(name)
        others += other if isinstance(other, list) else [other]
    return [row] if type(row) is int and row >= 0 and row not in others else []


# Classes of transformers that end in an output layer over words.
_WITH_OUTPUT = re.compile("ForCausalLM|LMHead|ForConditionalGeneration|ForMaskedLM|Seq2SeqLM")


def check_copies(opened: OpenedModel, tables: Sequence[List[str]]) -> None:
    """Refuse a file whose output layer has other numbers than the table that it shares.

    Some programs then take the one, some the other, and some do not share them. In memory two
    parameters are two.

    Raises:
        CheckpointError: the settings say that the two are one, and they differ.
    """
    if opened.path is None or text_settings(opened.settings).get("tie_word_embeddings") is not True:
        return
    shapes = {names[0]: table_shape(opened.tensors, names[0]) for names in tables}
    outputs = [names for names in output_tables(tables) if has_output_beside([names])]
    for output in outputs:
        if any(not has_output([[name]]) for name in output):
            continue  # which is one with a table of the input
        others = [
            names[0]
            for names in tables
            if not has_output([names]) and shapes[names[0]] == shapes[output[0]]
        ]
        if others:
            raise CheckpointError(
                f"{output[0]} to equal {' or '.join(others)} in {opened.name}, which share one "
                "table by tie_word_embeddings",
                "different values",
                "Set tie_word_embeddings to false in config.json if the model was trained so; or "
                "choose one with --table NAME.",
            )


def check_readable(
    opened: OpenedModel, tables: Sequence[List[str]], wanted: Optional[str]
) -> List[str]:
    """Refuse a model of which another table would be measured than the one that was asked for.

    Returns:
        Names of what is stored of an output layer, where no table of one can be read.

    Raises:
        CheckpointError: the table is stored in a form that is not read, or not stored here, or in
            two copies that differ.
    """
    sizes = opened.vocabulary_sizes()
    outputs = unread_outputs(opened.tensors, opened.unread, tables, sizes)
    if wanted is not None:
        name = wanted[: -len(".weight")] if wanted.endswith(".weight") else wanted
        asked = {k: v.why for k, v in opened.unread.items() if f"{k}.".startswith(f"{name}.")}
        readable = any(f"{key}.".startswith(f"{name}.") for key in opened.tensors)
        _refuse(opened, {} if readable else asked)
        return list(outputs)
    check_copies(opened, tables)
    _refuse(opened, {} if all(map(is_in_pieces, outputs)) else outputs)
    _refuse(opened, parts_of_outputs(opened.tensors, tables, sizes))
    adapters = sorted({adapted(key) for key in opened.tensors} - {""})
    changed = [] if has_output(tables) else [one for one in adapters if is_output_entry(one + ".")]
    if changed or (not tables and adapters and all(map(adapted, opened.tensors))):
        raise _of_an_adapter(opened, changed or adapters)
    if not tables:
        single = only_matrix(opened.tensors)
        rows = len(opened.tensors[single]) if single is not None else 0
        larger = {k: v for k, v in opened.unread.items() if len(v.shape) > 1 and v.shape[0] >= rows}
        _refuse(opened, {key: one.why for key, one in larger.items()})
    elif opened.untied and not outputs and not has_output(tables):
        if _WITH_OUTPUT.search(opened.arch or ""):
            raise CheckpointError(
                f"the output layer of {opened.arch}, which has a table of its own by the settings, "
                f"in {opened.name}",
                f"none under a known name beside {', '.join(names[0] for names in tables)}",
                "Give the file that holds it, or choose a table with --table NAME.",
            )
    return list(outputs)


def _refuse(opened: OpenedModel, unread: Mapping[str, str]) -> None:
    if unread:
        listed = "; ".join(f"{name}: {why}" for name, why in list(unread.items())[:4])
        raise CheckpointError(
            f"a table that can be read in {opened.name}",
            listed + ("; ..." if len(unread) > 4 else ""),
            "Save the model with floating-point numbers in one matrix, as it was before it was "
            "quantized or split, or choose another table with --table NAME.",
        )


def _of_an_adapter(opened: OpenedModel, modules: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"whole tables in {opened.name}",
        f"an adapter, such as LoRA's, that changes {', '.join(modules[:4])}"
        + (", ..." if len(modules) > 4 else ""),
        "Merge it into the model first (merge_and_unload() of peft), or choose the unchanged table "
        "with --table NAME.base_layer where the model has one.",
    )


def check_whole(
    opened: OpenedModel,
    names: Sequence[str],
    tables: Sequence[List[str]],
    shape: Tuple[int, int],
    wanted: Optional[str],
) -> List[str]:
    """Refuse a part of a table, and a table that an adapter changes.

    Returns:
        Sentences that belong to the description of the choice.
    """
    changed = {adapted(key) for key in [*opened.tensors, *opened.unread]} - {""}
    asked = wanted is not None and "base_layer" in wanted.split(".")
    bare = [name[: -len(".base_layer")] if name.endswith(".base_layer") else name for name in names]
    if not asked and all(name in changed for name in bare):
        raise _of_an_adapter(opened, sorted({*bare}))
    remarks = [opened.remark] if opened.remark else []
    if any(key in (names[0], f"{names[0]}.weight") for key in opened.turned):
        remarks.append(f"It is stored as {shape[1]} x {shape[0]}, with a column for each word.")
    sizes, dim = opened.vocabulary_sizes(), opened.settings.get("dim")
    rows, columns = shape
    if not any(names[0] in known for known in tables):
        return remarks
    short = bool(sizes) and rows < sizes[0]
    narrow = "norm_eps" in opened.settings and type(dim) is int and columns < dim  # of Llama
    if not short and not narrow:
        return remarks
    declared = f"{sizes[0]} words" if short else f"vectors of {dim} numbers"
    if wanted is None:
        raise CheckpointError(
            f"a table of {declared} in {opened.name}, as its settings say",
            f"{rows} x {columns} numbers in {names[0]}",
            "It may be one of several parts: give all of them, or choose it with --table NAME.",
        )
    return [*remarks, f"It is {rows} x {columns}, and the settings say {declared}."]
