"""What every format is read into: tensors that are read when they are used, and what is known."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator, List, Mapping, Optional, Sequence, Tuple

from torch import Tensor

from spectral_fairseq.checkpoints.dictionary import WordList
from spectral_fairseq.checkpoints.formats.shards import Shards
from spectral_fairseq.checkpoints.table_uses import (
    adapted,
    has_output,
    is_in_pieces,
    is_output_entry,
)
from spectral_fairseq.checkpoints.tables import (
    Unread,
    only_matrix,
    parts_of_outputs,
    unread_outputs,
)
from spectral_fairseq.errors import CheckpointError

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
    def untied(self) -> bool:
        """Whether the settings say that the output layer does not share the input's table."""
        return text_settings(self.settings).get("tie_word_embeddings") is False


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
    mapping = mapping.long()
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


def text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the part of a model that has the words, with those of the whole before it."""
    inner = next(
        (one for one in map(settings.get, ("text_config", "decoder")) if isinstance(one, Mapping)),
        {},
    )
    return {**inner, **{name: value for name, value in settings.items() if value is not None}}


def padding_rows(settings: Mapping[str, Any]) -> List[int]:
    """The row of the padding symbol, unless the symbol has another meaning as well.

    Args:
        settings: of a model of transformers, its config.json.
    """
    settings = text_settings(settings)
    row = settings.get("pad_token_id")
    others: List[Any] = []
    for name in ("bos_token_id", "eos_token_id", "unk_token_id"):
        other = settings.get(name)
        others += other if isinstance(other, list) else [other]
    return [row] if type(row) is int and row >= 0 and row not in others else []


# Classes of transformers that end in an output layer over words.
_WITH_OUTPUT = re.compile("ForCausalLM|LMHead|ForConditionalGeneration|ForMaskedLM|Seq2SeqLM")


def check_readable(
    opened: OpenedModel, tables: Sequence[List[str]], wanted: Optional[str]
) -> List[str]:
    """Refuse a model of which another table would be measured than the one that was asked for.

    Args:
        opened: the model.
        tables: for each of its tables that can be read, the modules that hold it.
        wanted: value of ``--table``; None for the output table.

    Returns:
        Names of what is stored of an output layer, where no table of one can be read.

    Raises:
        CheckpointError: the table is stored in a form that is not read, or not stored here.
    """
    sizes = opened.vocabulary_sizes()
    outputs = unread_outputs(opened.tensors, opened.unread, tables, sizes)
    if wanted is not None:
        name = wanted[: -len(".weight")] if wanted.endswith(".weight") else wanted
        asked = {k: v.why for k, v in opened.unread.items() if f"{k}.".startswith(f"{name}.")}
        readable = any(f"{key}.".startswith(f"{name}.") for key in opened.tensors)
        _refuse(opened, {} if readable else asked)
        return list(outputs)
    _refuse(opened, {} if all(map(is_in_pieces, outputs)) else outputs)
    _refuse(opened, parts_of_outputs(opened.tensors, tables))
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

    Args:
        opened: the model.
        names: modules that hold the chosen table.
        tables: as for :func:`check_readable`.
        shape: of the table.
        wanted: likewise.

    Returns:
        Sentences that belong to the description of the choice.

    Raises:
        CheckpointError: such a table was found, and not named.
    """
    changed = {adapted(key) for key in [*opened.tensors, *opened.unread]} - {""}
    asked = wanted is not None and "base_layer" in wanted.split(".")
    bare = [name[: -len(".base_layer")] if name.endswith(".base_layer") else name for name in names]
    if not asked and all(name in changed for name in bare):
        raise _of_an_adapter(opened, sorted({*bare}))
    remarks = [opened.remark] if opened.remark else []
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
