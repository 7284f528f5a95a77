"""Measures models and collects the results in one JSON document with signatures."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch

from spectral_fairseq.analysis.measures import Measured, measure_table
from spectral_fairseq.analysis.options import Options, StepCallback
from spectral_fairseq.analysis.wording import choice_in_words
from spectral_fairseq.checkpoints import archive
from spectral_fairseq.errors import CheckpointError, ConfigurationError, check_count
from spectral_fairseq.formats.config import is_decoder, writes_words
from spectral_fairseq.formats.counts import Counts, with_counts
from spectral_fairseq.formats.memory import open_memory
from spectral_fairseq.formats.opening import open_model
from spectral_fairseq.formats.stored import Stored
from spectral_fairseq.formats.table import StoredTable, read_table
from spectral_fairseq.formats.which_table import Choice, choose
from spectral_fairseq.formats.words import words_of
from spectral_fairseq.functional.spectrum_penalty import Prior
from spectral_fairseq.methods.prior import OPTIONS, prior_of
from spectral_fairseq.options import arguments
from spectral_fairseq.provenance import Noted, finite, sha256, signature, tensor_sha256, versions

SCHEMA = "spectral-fairseq/analysis/1"
# Flags of any criterion that control a table, off where they are 0.
_CONTROLS = ("spectrum_weight", "spectrum_decay", "table_centering")


@dataclass
class Analysed:
    """One model's results.

    Attributes:
        result: its entry in the document, ready for JSON.
        measured: the same with the points of the projection.
    """

    result: Dict[str, Any]
    measured: Measured


def analyse_model(
    model: Any,
    options: Options,
    *,
    label: Optional[str] = None,
    table: Optional[str] = None,
    dictionary: Optional[Union[str, Path]] = None,
    counts: Optional[Union[str, Path, Counts]] = None,
    progress: Optional[StepCallback] = None,
    verify: bool = True,
) -> Analysed:
    """Measure one table, with the arguments of :func:`~spectral_fairseq.analysis.api.analyze`."""
    progress = progress or StepCallback()
    progress.begin("load")
    opened = open_model(model) if is_path(model) else open_memory(model)
    choice = choose(opened, table)
    rows, _ = choice.shape
    words, remark = words_of(opened, choice.names[0], rows, dictionary)
    read = [*opened.noted, words.noted if words is not None else None]
    if counts is not None:
        read.append(Noted.of(counts) if isinstance(counts, (str, os.PathLike)) else None)
        words = with_counts(words, counts, rows, opened.uncounted)
    uncounted = opened.uncounted if words is None else words.uncounted_rows()
    chosen = read_table(choice, uncounted)
    table_hash = _table_hash(opened, chosen, progress, verify)
    prior = recorded_prior(opened.training.get("model", {}), chosen)
    measured = measure_table(chosen, options, words, prior, progress)
    result = {
        "path": None if opened.file is None else opened.name,
        "label": label or label_of(model),
        "sha256": table_hash,
        "origin": _origin(choice),
        "arch": opened.arch,
        "language_model": _is_language_model(opened),
        "trained_with": _trained_with(opened.training.get("criterion", {}), chosen),
        "progress": {"epoch": opened.epoch, "updates": opened.updates},
        "table": {
            "name": chosen.name,
            "names": choice.names,
            "choice": choice_in_words(choice),
            "is_output": choice.of_softmax,
            "kind": chosen.kind,
            "rows": rows,
            "words": len(chosen.rows),
            "dimensions": chosen.weight.size(1),
            "dtype": chosen.dtype,
        },
        "dictionary": {
            **_file_entry(None if words is None else words.path),
            "remark": remark,
            "counts": _counts_entry(counts),
        },
        "measures": measured.measures,
        **measured.details,
        "outputs": None,
        "nbest": None,
    }
    for noted in filter(None, read):
        noted.check()
    result["signature"] = signature_of(result, options)
    progress.end()
    return Analysed(result, measured)


def _is_language_model(opened: Stored) -> bool:
    """Whether the model is known to be a decoder alone: it has numbered layers and no encoder."""
    parts = [name.split(".") for name in opened.tensors]
    has_layers = any(part.isdigit() for name in parts for part in name)
    arch = opened.arch or ""
    if is_decoder(arch):
        return True
    if writes_words(arch) or re.search(r"For[A-Z]|Bert", arch):  # of transformers
        return False
    return has_layers and not any("encoder" in name for name in parts)


def _trained_with(criterion: Mapping[str, Any], table: StoredTable) -> List[str]:
    """Of the methods of a fairseq checkpoint's training those that a report's advice knows."""
    controlled = criterion.get("_name") == "spectrum_control"
    controlled |= any(criterion.get(name) for name in _CONTROLS)
    methods = {"spectrum control": controlled, "weight norm": table.kind == "weight-norm"}
    return [name for name, used in methods.items() if used]


def _origin(choice: Choice) -> str:
    """``fairseq``, ``model`` or ``vectors``; see ``wording.py``, Note [Origins]."""
    if choice.model.training:
        return "fairseq"
    return "model" if choice.is_known or choice.model.arch is not None else "vectors"


def _table_hash(opened: Stored, table: StoredTable, progress: StepCallback, verify: bool) -> str:
    """Hash of the verified file that holds the table; of one in memory, its own."""
    file = opened.file_of(table.name)
    if file is None:
        progress.begin("hash", len(table.weight))
        return tensor_sha256(table.weight, progress.advance)
    if verify:
        archive.check_sums(archive.entries(file), file)
    progress.begin("hash", os.path.getsize(file))
    return sha256(file, progress.advance)


def _file_entry(path: Any) -> Dict[str, Optional[str]]:
    known = is_path(path)
    return {"path": str(path) if known else None, "sha256": sha256(path) if known else None}


def _counts_entry(counts: Any) -> Dict[str, Optional[str]]:
    """As for a file; counts in memory have a hash of what they say."""
    if counts is None or is_path(counts):
        return _file_entry(counts)
    said = sorted(counts.items()) if isinstance(counts, Mapping) else [float(n) for n in counts]
    return {"path": None, "sha256": hashlib.sha256(repr(said).encode()).hexdigest()}


def is_path(model: Any) -> bool:
    """Whether a model is named, rather than in memory."""
    return isinstance(model, (str, os.PathLike))


def document(command: str, analysed: Sequence[Analysed], options: Options) -> Dict[str, Any]:
    """Return the document: versions, options, and one entry for each checkpoint."""
    chosen = dataclasses.asdict(options)
    chosen["words"] = list(options.words)
    return finite(
        {
            "schema": SCHEMA,
            "command": command,
            "versions": versions(),
            "threads": torch.get_num_threads(),
            "options": chosen,
            "checkpoints": [model.result for model in analysed],
        }
    )


def signature_of(result: Mapping[str, Any], options: Options) -> str:
    """Options, seed, versions and hashes behind one checkpoint's figures, in one line."""
    table, dictionary_hash = result["table"], result["dictionary"]["sha256"]
    counts_hash = result["dictionary"]["counts"]["sha256"]
    samples = result["isotropy_runs"]
    return signature(
        {
            "table": table["name"],
            "kind": table["kind"],
            "words": f"{table['words']}of{table['rows']}",
            "dim": table["dimensions"],
            "isotropy": f"{samples['words']}x{len(samples['values']['i1'])}" if samples else "all",
            "cosines": result["cosines"]["words"],
            "seed": options.seed,
            "dict": dictionary_hash[:12] if dictionary_hash else "none",
            **({"counts": counts_hash[:12]} if counts_hash else {}),
            "ckpt": result["sha256"][:12],
        }
    )


def label_of(model: Any) -> str:
    """The short name of a model: its file without the ending, its folder, or its type."""
    return _parts_of(model)[-1] if is_path(model) else type(model).__name__


def labels_for(models: Sequence[Any], labels: Optional[Sequence[str]] = None) -> List[str]:
    """A different name for each model, as short as that allows."""
    if labels is not None:
        names = set(labels) - {""} if len(labels) == len(models) else labels
        what = "different names in `labels`, one for each model"
        check_count(len(names), len(models), what, "Give each its own.")
        return list(labels)
    named = [_parts_of(model) if is_path(model) else (label_of(model),) for model in models]
    for depth in range(1, max(map(len, named)) + 1):
        shortened = [os.path.join(*parts[-depth:]) for parts in named]
        if len(set(shortened)) == len(shortened):
            return shortened
    return [f"{os.path.join(*parts)} ({number})" for number, parts in enumerate(named, 1)]


def _parts_of(model: Union[str, os.PathLike]) -> Tuple[str, ...]:
    """The parts of a path, without the ending of a file's name, as text."""
    # A name may hold bytes that are no text, which no font has.
    path = Path(os.fsencode(model).decode("utf-8", "backslashreplace"))
    # with_suffix() refuses ".", a mistake that the loader explains.
    if os.path.isdir(model) and path.parts:
        return path.parts
    return (path.parent / path.stem).parts or (".",)


def recorded_prior(model: Mapping[str, Any], table: StoredTable) -> Optional[Prior]:
    """The prior that a table was trained with, by the settings of its model; None without one."""
    if table.kind != "svd" or not model.get("spectrum_prior"):
        return None
    given = {one.name: model.get(one.name, one.default) for one in OPTIONS}
    try:
        return prior_of(arguments(OPTIONS, SimpleNamespace(**given)))
    except (ConfigurationError, TypeError, ValueError) as error:
        raise CheckpointError(
            "the name and numbers of a prior in the checkpoint's settings spectrum_*",
            ", ".join(f"{name} {value!r}" for name, value in given.items()),
            "Use a checkpoint that trained.",
        ) from error
