"""Patches of how fairseq reads data: all of it, undamaged, and without a shell."""

from __future__ import annotations

import itertools
import os
import struct
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import numpy as np

from spectral_fairseq.checkpoints.dictionary import MAX_COUNT
from spectral_fairseq.compat.patching import Patch, replaces, wrapping
from spectral_fairseq.errors import DataError, MissingDataError, check_enough
from spectral_fairseq.files import check_file


def _unneeded_tail_batch() -> Optional[str]:
    from fairseq.data import data_utils

    kept_all = _sentences_kept(data_utils.batch_by_size) == 3
    return "this fairseq batches all sentences" if kept_all else None


def _install() -> str:
    from fairseq.data import data_utils

    # Datasets import data_utils inside their own batch_by_size, so this one name is enough.
    changed = replaces({"fairseq.data.data_utils:batch_by_size": keep_tail})()
    if _sentences_kept(data_utils.batch_by_size) != 3:
        raise RuntimeError("it drops sentences in a way that is not known here")
    return changed


def _sentences_kept(batch_by_size: Callable[..., List[np.ndarray]]) -> int:
    batches = batch_by_size(
        np.arange(3),
        num_tokens_fn=lambda _: 1,
        max_sentences=2,
        required_batch_size_multiple=2,
    )
    return sum(len(batch) for batch in batches)


@wrapping
def keep_tail(
    indices: Any,
    num_tokens_fn: Callable[[int], int],
    num_tokens_vec: Any = None,
    max_tokens: Optional[int] = None,
    max_sentences: Optional[int] = None,
    required_batch_size_multiple: int = 1,
    fixed_shapes: Any = None,
    *,
    original: Callable[..., List[np.ndarray]],
) -> List[np.ndarray]:
    """Wrap a ``batch_by_size`` so that its batches cover all indices.

    The compiled batching cuts the index array into consecutive slices; what fairseq removes
    afterwards is therefore exactly the end of the array.
    """
    if not isinstance(indices, np.ndarray):
        indices = np.fromiter(indices, dtype=np.int64, count=-1)
    if len(indices) == 0:
        return []  # fairseq looks at the last batch, which an empty set does not have
    batches = original(
        indices,
        num_tokens_fn,
        num_tokens_vec=num_tokens_vec,
        max_tokens=max_tokens,
        max_sentences=max_sentences,
        required_batch_size_multiple=required_batch_size_multiple,
        fixed_shapes=fixed_shapes,
    )
    if fixed_shapes is not None:
        return batches
    batched = sum(len(batch) for batch in batches)
    return list(batches) + ([indices[batched:]] if batched < len(indices) else [])


TAIL_BATCH = Patch(
    name="tail batch",
    reason="The last batch is dropped unless its length is a multiple of "
    "--required-batch-size-multiple, so that sentences are neither translated nor evaluated.",
    install=_install,
    unneeded=_unneeded_tail_batch,
)


# A split in several parts (train, train1, ...) is read with each part once.
#
# The tasks of translation repeat the first part ``--upsample-primary`` times. Its default of -1
# means "no repetition", but reaches the dataset as it is.


@wrapping
def repeated_once(
    self: Any, datasets: Any, sample_ratios: Any = 1, *, original: Callable[..., None]
) -> None:
    """Wrap ``ConcatDataset.__init__`` so that a negative ratio is 1."""
    if not isinstance(sample_ratios, int):
        sample_ratios = [1 if ratio < 0 else ratio for ratio in sample_ratios]
    original(self, datasets, sample_ratios)


SEVERAL_PARTS = Patch(
    name="data in several parts",
    reason="Translation data in several parts (train, train1, ...; --combine-valid-subsets) fail "
    "with 'negative dimensions are not allowed' unless --upsample-primary is given.",
    install=replaces({"fairseq.data.concat_dataset:ConcatDataset.__init__": repeated_once}),
)


# A damaged split of binarised data is refused before anything is computed from it.
#
# This patch mostly changes error messages. It is worth its lines because a copy that was cut short,
# or a dictionary of another run, otherwise fails hours later in the middle of an epoch, if at all:
# on a GPU with an assertion that names neither the file nor the token.


_DICTIONARY_REMEDY = "Check the path, or make the dictionary with fairseq-preprocess."


@wrapping
def check_first(
    path: str,
    dictionary: Any = None,
    dataset_impl: Any = None,
    combine: bool = False,
    *args: Any,
    original: Callable[..., Any],
    **kwargs: Any,
) -> Any:
    """Wrap ``load_indexed_dataset``, through which tasks open their splits."""
    words = None if dictionary is None else len(dictionary)
    for number in itertools.count():
        prefix = f"{path}{number or ''}"
        check_indexed_files(prefix, words)
        if not combine or not os.path.exists(f"{prefix}.idx"):
            break
    return original(path, dictionary, dataset_impl, combine, *args, **kwargs)


@wrapping
def check_dictionary(self: Any, f: Any, *, original: Callable[..., None]) -> None:
    """Wrap ``Dictionary.add_from_file``, which would wait for a pipe and take any count."""
    if not isinstance(f, str):
        return original(self, f)
    kind = DataError if os.path.lexists(f) else MissingDataError
    check_file(f, "a dictionary", _DICTIONARY_REMEDY, kind)
    try:
        original(self, f)
    except OSError:
        raise
    except Exception as error:  # fairseq raises this very class for text that is not UTF-8
        found = " ".join(str(error).split())  # it may quote a line with its end
        wanted = f"lines of a word and its count in {f}"
        raise DataError(wanted, found, _DICTIONARY_REMEDY) from error
    for symbol, count in zip(self.symbols, self.count):
        if not 0 <= count <= MAX_COUNT:
            raise DataError(
                f"counts of 0 or more, below 2**63, in the dictionary {f}",
                f"{str(count)[:30]} of {symbol[:60]!r}",
                _DICTIONARY_REMEDY,
            )


DAMAGED_DATA = Patch(
    name="damaged data",
    reason="Binarised data that are cut short, or made with another dictionary, fail in the middle "
    "of training without the name of a file, or give wrong figures.",
    install=replaces(
        {
            "fairseq.data.data_utils:load_indexed_dataset": check_first,
            "fairseq.data:Dictionary.add_from_file": check_dictionary,
        }
    ),
)


# The index of a FASTA file is made without a shell.
#
# fairseq writes the path of the data into a shell command, so that a folder or a language called
# ``$(program)`` runs a program. A language's name comes from the checkpoint.


Index = Tuple[np.ndarray, np.ndarray]


def _unneeded_fasta_index() -> Optional[str]:
    from fairseq.data.fasta_dataset import FastaDataset

    runs_a_shell = hasattr(FastaDataset, "_build_index")
    return None if runs_a_shell else "this fairseq makes no index of FASTA data"


def fasta_index(path: str) -> Index:
    """Where the records of a FASTA file begin, and how long their sequences are.

    Args:
        path: the file; each record is a line that starts with ``>``, then lines of its sequence.

    Returns:
        Offsets in bytes and lengths in characters, int64, one for each record.
    """
    offsets: List[int] = []
    lengths: List[int] = []
    place = 0
    with open(path, "rb") as file:
        for line in file:
            if line.startswith(b">"):
                offsets.append(place)
                lengths.append(0)
            elif lengths:
                lengths[-1] += len(line.decode("utf-8", "replace").strip())
            place += len(line)
    return np.array(offsets, np.int64), np.array(lengths, np.int64)


@wrapping
def without_shell(self: Any, path: str, *, original: Callable[..., Index]) -> Index:  # noqa: ARG001
    """Replace ``FastaDataset._build_index``."""
    from fairseq.data.fasta_dataset import fasta_file_path

    return fasta_index(fasta_file_path(path))


FASTA_INDEX = Patch(
    name="FASTA index",
    reason="fairseq writes the path of FASTA data into a shell command, so that the name of a "
    "folder or a language can run a program.",
    install=replaces({"fairseq.data.fasta_dataset:FastaDataset._build_index": without_shell}),
    unneeded=_unneeded_fasta_index,
)


# Nothing that the model can read.
#
# Sentences and pieces of text that are longer than the model's positions are skipped: always in
# training, with --skip-invalid-size-inputs-valid-test elsewhere. fairseq-eval-lm cuts a text into
# pieces of --tokens-per-sample, 1,024 by default: of a model of 512 all but the last one are
# skipped. Where nothing is left, fairseq-eval-lm prints "Evaluated 0 tokens" and the perplexity 1,
# fairseq-generate and -validate divide by zero, and a training has epochs without an update.


@wrapping
def refuse_nothing(
    self: Any,
    indices: Any,
    dataset: Any,
    max_positions: Any = None,
    *args: Any,
    original: Callable[..., Any],
    **kwargs: Any,
) -> Any:
    """Wrap the ``filter_indices_by_size`` of tasks, so that it refuses to skip everything."""
    kept = original(self, indices, dataset, max_positions, *args, **kwargs)
    if len(kept) > 0 or len(indices) == 0:
        return kept
    raise DataError(
        "text in pieces that the model can read",
        f"{len(indices):,}, all skipped, such as one of {dataset.size(indices[0])} tokens; the "
        f"model reads {max_positions}",
        "Cut the text into shorter pieces: sentences, or --tokens-per-sample of a language model "
        "(less --context-window, if any).",
    )


NOTHING_LEFT = Patch(
    name="nothing left",
    reason="Where every sentence is longer than the model reads and is skipped, fairseq-eval-lm "
    "prints the perplexity 1, fairseq-generate and fairseq-validate divide by zero, and "
    "fairseq-train goes through its epochs without an update.",
    install=replaces(
        {"fairseq.tasks.fairseq_task:FairseqTask.filter_indices_by_size": refuse_nothing}
    ),
)


# The two files of a binarised split: whether their sizes, offsets and word indices can be true.
#
# ``fairseq-preprocess`` writes the tokens of a split into PREFIX.bin, and where each sentence
# begins into PREFIX.idx. fairseq believes what they say, so that a file that was cut short or
# belongs to another dictionary ends in a traceback from numpy or torch, often hours later, or in
# wrong figures.

# First bytes of the formats: --dataset-impl mmap, the older "lazy" and "cached", and "huffman".
_MAPPED, _OLDER, _HUFFMAN = b"MMIDIDX\x00\x00", b"TNTIDX\x00\x00", b"HUFFIDX\x00\x00"
_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2", 9: "u4", 10: "u8"}
_BLOCK = 2**22  # indices that are looked at together

_AGAIN = "Copy both files again, or make them again with fairseq-preprocess."


class IndexFile(NamedTuple):
    """What a .idx file says.

    Attributes:
        dtype: of the word indices in the .bin file.
        first: what is stored for word 0.
        begins: where each sentence begins, in bytes of the .bin file.
        ends: where each sentence ends.
    """

    dtype: np.dtype
    first: int
    begins: np.ndarray
    ends: np.ndarray


def check_indexed_files(prefix: str, words: Optional[int]) -> None:
    """Refuse a split that cannot be what ``fairseq-preprocess`` wrote.

    Reads both files once, as fairseq does when it opens them. Another format than that of two
    files, and a split that does not exist, are left to fairseq.

    Args:
        prefix: path of the two files without .idx and .bin.
        words: size of the dictionary; None if there is none.

    Raises:
        MissingDataError: there is one file without the other.
        DataError: a file is cut, of another format or no regular file, sentences lie outside of
            the .bin file, or a token is not in the dictionary.
    """
    paths = [f"{prefix}.idx", f"{prefix}.bin"]
    missing = [path for path in paths if not os.path.exists(path)]
    if len(missing) == 2:
        return
    if missing:
        raise MissingDataError(f"both files of the split {prefix}", f"no {missing[0]}", _AGAIN)
    for path in paths:
        check_file(path, "a regular file", _AGAIN, DataError)
    index = _read(paths[0])
    if index is None:  # a format without word indices
        return
    size = os.path.getsize(paths[1])
    count = len(index.ends)
    check_enough(count, 1, f"sentence in {paths[0]}", "Check the text that it was made from.")
    if index.begins.min() < 0 or (index.ends < index.begins).any() or index.ends.max() > size:
        raise DataError(
            f"sentences within the {size:,} bytes of {paths[1]}, as {paths[0]} describes them",
            f"one that ends at byte {int(index.ends.max()):,}, or of negative length or place",
            _AGAIN,
        )
    if words is not None:
        _check_tokens(paths[1], index, words)


def _read(path: str) -> Optional[IndexFile]:
    """The content of a .idx file; None if it is of fairseq's Huffman format."""
    with open(path, "rb") as file:
        start = file.read(len(_MAPPED))
    try:
        if start == _MAPPED:
            return _read_mapped(np.memmap(path, mode="r"))
        if start.startswith(_OLDER):
            return _read_older(np.memmap(path, mode="r"))
        if start == _HUFFMAN:
            return None
        raise ValueError(f"the first bytes {start!r}")
    except (KeyError, ValueError, struct.error) as error:
        found = f"{os.path.getsize(path):,} bytes with a wrong header or length ({error})"
        raise DataError(f"an index of fairseq-preprocess at {path}", found, _AGAIN) from error


def _read_mapped(content: np.ndarray) -> IndexFile:
    version, code, count = struct.unpack_from("<QBQ", content.data, len(_MAPPED))
    start = len(_MAPPED) + struct.calcsize("<QBQ")
    if version != 1 or len(content) != start + 12 * count:
        raise ValueError("cut, or another version")
    dtype = np.dtype(_DTYPES[code])
    lengths = np.frombuffer(content, "<i4", count, start).astype(np.int64)
    begins = np.frombuffer(content, "<i8", count, start + 4 * count)
    return IndexFile(dtype, 0, begins, begins + lengths * dtype.itemsize)


def _read_older(content: np.ndarray) -> IndexFile:
    version, code, _, count, dims = struct.unpack_from("<QQQQQ", content.data, len(_OLDER))
    start = len(_OLDER) + struct.calcsize("<QQQQQ")
    if version != 1 or len(content) != start + 8 * (2 * (count + 1) + dims) or dims != count:
        raise ValueError("cut, or another version, or no sequences")
    dtype = np.dtype(_DTYPES[code])
    places = np.frombuffer(content, "<i8", 2 * (count + 1) + dims, start)
    offsets, lengths = places[count + 1 : 2 * count + 2], places[2 * count + 2 :]
    if (places[: count + 1] != np.arange(count + 1)).any() or (np.diff(offsets) != lengths).any():
        raise ValueError("offsets that do not follow from the lengths")
    return IndexFile(dtype, 1, offsets[:-1] * dtype.itemsize, offsets[1:] * dtype.itemsize)


def _check_tokens(path: str, index: IndexFile, words: int) -> None:
    tokens = np.memmap(path, index.dtype, "r") if index.ends.max() else np.zeros(0, index.dtype)
    for start in range(0, len(tokens), _BLOCK):
        block = tokens[start : start + _BLOCK]
        for word in (int(block.min()) - index.first, int(block.max()) - index.first):
            if not 0 <= word < words:
                raise DataError(
                    f"indices of the {words:,} words of the dictionary in {path}",
                    str(word),
                    "Use the dictionary with which the data were made, or make them again with "
                    "it: fairseq-preprocess --srcdict (and --tgtdict).",
                )
