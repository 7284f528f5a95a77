"""Measures checkpoint files and collects the results in one JSON document with signatures."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch

from spectral_fairseq.analysis.callback import StepCallback
from spectral_fairseq.analysis.measures import Measured, measure_table
from spectral_fairseq.analysis.options import Options
from spectral_fairseq.checkpoints.dictionary import WordList, checkpoint_settings, find_dictionary
from spectral_fairseq.checkpoints.reading import load_checkpoint, tensors_of
from spectral_fairseq.checkpoints.saved import checkpoint_file
from spectral_fairseq.checkpoints.table_uses import describe_choice
from spectral_fairseq.checkpoints.tables import (
    StoredTable,
    choose_table,
    extract_table,
    find_tables,
    table_shape,
)
from spectral_fairseq.errors import CheckpointError, ConfigurationError
from spectral_fairseq.functional.penalties.spectrum import DEFAULT_GAMMA
from spectral_fairseq.provenance import finite, sha256, signature, versions

SCHEMA = "spectral-fairseq/analysis/1"


@dataclass
class Analysed:
    """One checkpoint's results.

    Attributes:
        result: its entry in the document, ready for JSON.
        measured: the same with the points of the projection.
    """

    result: Dict[str, Any]
    measured: Measured


def analyse_checkpoint(
    path: Union[str, Path],
    options: Options,
    *,
    label: Optional[str] = None,
    table: Optional[str] = None,
    dictionary: Optional[Union[str, Path]] = None,
    progress: Optional[StepCallback] = None,
    verify: bool = True,
) -> Analysed:
    """Measure one checkpoint's table.

    Args:
        path: the file.
        options: what is sampled.
        label: name in tables and pictures; the file's if not given.
        table: which table, where there are several.
        dictionary: dict.txt or a folder of binarised data; looked for if not given.
        progress: follows the steps.
        verify: as of :func:`~spectral_fairseq.checkpoints.reading.load_checkpoint`.

    Raises:
        CheckpointError: unreadable, no table, or several.
        DataError: a table or dictionary that cannot be used.
        ConfigurationError: an impossible option.
    """
    options.check()
    progress = progress or StepCallback()
    progress.begin("hash", os.path.getsize(checkpoint_file(path)))
    file_hash = sha256(path, progress.advance)
    progress.begin("load")
    checkpoint = load_checkpoint(path, verify)
    checkpoint["model"] = tensors_of(checkpoint["model"])
    checkpoint.pop("last_optimizer_state", None)
    words, remark = _dictionary_of(checkpoint, path, table, dictionary)
    chosen = extract_table(
        checkpoint["model"], path, table, None if words is None else words.uncounted_rows()
    )
    choice = describe_choice(chosen.names, list(find_tables(checkpoint.pop("model")).values()))
    measured = measure_table(chosen, options, words, prior_of(checkpoint, chosen), progress)
    result = {
        "path": str(path),
        "label": label or Path(path).stem,
        "sha256": file_hash,
        "arch": _arch(checkpoint),
        "progress": _progress(checkpoint),
        "table": {
            "name": chosen.name,
            "names": chosen.names,
            "choice": choice,
            "kind": chosen.kind,
            "rows": chosen.stored_rows,
            "words": len(chosen.rows),
            "dimensions": chosen.weight.size(1),
            "dtype": chosen.dtype,
        },
        "dictionary": {
            "path": None if words is None else str(words.path),
            "sha256": None if words is None else sha256(words.path),
            "remark": remark,
        },
        "measures": measured.measures,
        **measured.details,
        "outputs": None,
        "nbest": None,
    }
    result["signature"] = signature_of(result, options)
    return Analysed(result, measured)


def document(command: str, analysed: Sequence[Analysed], options: Options) -> Dict[str, Any]:
    """Return the document, whose JSON schema is :mod:`analysis.schema`.

    Args:
        command: ``analyze`` or ``compare``.
        analysed: one for each checkpoint.
        options: common to all of them.
    """
    chosen = dataclasses.asdict(options)
    chosen["words"] = list(options.words)
    return finite(
        {
            "schema": SCHEMA,
            "command": command,
            "versions": versions(),
            "threads": torch.get_num_threads(),
            "options": chosen,
            "checkpoints": [one.result for one in analysed],
        }
    )


def signature_of(result: Mapping[str, Any], options: Options) -> str:
    """Options, seed, versions and hashes behind one checkpoint's figures, in one line."""
    table, dictionary_hash = result["table"], result["dictionary"]["sha256"]
    samples = result["isotropy_runs"]
    return signature(
        {
            "table": table["name"],
            "kind": table["kind"],
            "words": f"{table['words']}of{table['rows']}",
            "dim": table["dimensions"],
            "isotropy": f"{samples['words']}x{options.isotropy_runs}" if samples else "all",
            "cosines": result["cosines"]["words"],
            "seed": options.seed,
            "dict": dictionary_hash[:12] if dictionary_hash else "none",
            "ckpt": result["sha256"][:12],
        }
    )


def labels_for(paths: Sequence[Path], given: Optional[Sequence[str]] = None) -> List[str]:
    """A different name for each checkpoint, as short as that allows.

    Args:
        paths: the files.
        given: names to use instead, one for each.

    Raises:
        ConfigurationError: not one name for each, or two alike.
    """
    if given is not None:
        if len(given) != len(paths) or len(set(given)) != len(given):
            raise ConfigurationError(
                f"{len(paths)} different names in --labels, one for each checkpoint",
                f"{len(given)}: {', '.join(given)}",
                "Separate them by commas.",
            )
        return list(given)
    # with_suffix() refuses ".", a mistake that the loader explains.
    named = [path.parent / path.stem for path in paths]
    for depth in range(1, max(len(path.parts) for path in named) + 1):
        labels = ["/".join(path.parts[-depth:]) for path in named]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{path} ({number})" for number, path in enumerate(named, 1)]


def prior_of(checkpoint: Mapping[str, Any], table: StoredTable) -> Optional[Dict[str, Any]]:
    """The prior that a table was trained with, from the checkpoint's flags; None if it had none."""
    model = checkpoint_settings(checkpoint, "model")
    kind = model.get("spectrum_prior")
    if table.kind != "svd" or not kind:
        return None
    c1, gamma = model.get("spectrum_c1"), model.get("spectrum_gamma")
    try:
        return {
            "kind": str(kind),
            "c1": None if c1 in (None, "auto") else float(c1),
            "c2": float(model.get("spectrum_c2") or 0.0),
            "gamma": float(DEFAULT_GAMMA[str(kind)] if gamma is None else gamma),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            "the name and numbers of a prior in the checkpoint's settings spectrum_*",
            f"{kind!r} with c1 {c1!r} and gamma {gamma!r}",
            "Use a checkpoint that trained.",
        ) from error


def _dictionary_of(
    checkpoint: Mapping[str, Any],
    path: Any,
    table: Optional[str],
    given: Optional[Union[str, Path]],
) -> Tuple[Optional[WordList], str]:
    names = choose_table(checkpoint["model"], table, path)
    rows = table_shape(checkpoint["model"], names[0])[0]
    return find_dictionary(given, checkpoint, names[0], rows, path)


def _arch(checkpoint: Mapping[str, Any]) -> Optional[str]:
    model = checkpoint_settings(checkpoint, "model")
    arch = model.get("_name") or model.get("arch")
    return None if arch is None else str(arch)


def _progress(checkpoint: Mapping[str, Any]) -> Dict[str, Optional[int]]:
    """Epochs and updates done when the checkpoint was saved."""
    history = checkpoint.get("optimizer_history") or [{}]
    last = history[-1] if isinstance(history[-1], dict) else {}
    iterator = (checkpoint.get("extra_state") or {}).get("train_iterator") or {}
    epoch, updates = iterator.get("epoch"), last.get("num_updates")
    return {
        "epoch": int(epoch) if epoch is not None else None,
        "updates": int(updates) if updates is not None else None,
    }
