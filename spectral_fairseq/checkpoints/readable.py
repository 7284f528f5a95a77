"""Whether the table that was asked for can be read, and is whole: what is refused before it is."""

from __future__ import annotations

import re
from typing import Dict, List, Mapping, Optional, Sequence

from spectral_fairseq.checkpoints.config import text_settings
from spectral_fairseq.checkpoints.table_entries import (
    adapted,
    has_output,
    has_output_beside,
    is_in_pieces,
    is_output_entry,
    is_surely_output,
    output_tables,
)
from spectral_fairseq.checkpoints.tables import Tables, dtype_name
from spectral_fairseq.checkpoints.tensors import FLOATING
from spectral_fairseq.errors import CheckpointError, listed

# Over how many devices the rows of a table are usually split.
_DEVICES = (2, 4, 8, 16)

# Classes of transformers that end in an output layer over words.
_WITH_OUTPUT = re.compile("ForCausalLM|LMHead|ForConditionalGeneration|ForMaskedLM|Seq2SeqLM")


def check_copies(opened: Tables) -> None:
    """Refuse a file whose output layer has other numbers than the table that it shares.

    Some programs then take the one, some the other, and some do not share them. In memory two
    parameters are two.

    Raises:
        CheckpointError: the settings say that the two are one, and they differ.
    """
    if opened.path is None or text_settings(opened.settings).get("tie_word_embeddings") is not True:
        return
    shapes = {names[0]: opened.shape(names[0]) for names in opened.groups}
    outputs = [names for names in output_tables(opened.groups) if has_output_beside([names])]
    for output in outputs:
        if any(not has_output([[name]]) for name in output):
            continue  # which is one with a table of the input
        others = [
            names[0]
            for names in opened.groups
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


def check_readable(opened: Tables, wanted: Optional[str]) -> List[str]:
    """Refuse a model of which another table would be measured than the one that was asked for.

    Returns:
        Names of what is stored of an output layer, where no table of one can be read.

    Raises:
        CheckpointError: the table is stored in a form that is not read, or not stored here, or in
            two copies that differ.
    """
    outputs = unread_outputs(opened)
    if wanted is not None:
        name = wanted.removesuffix(".weight")
        asked = {k: v.why for k, v in opened.unread.items() if f"{k}.".startswith(f"{name}.")}
        readable = any(f"{key}.".startswith(f"{name}.") for key in opened.tensors)
        _refuse(opened, {} if readable else asked)
        return list(outputs)
    check_copies(opened)
    _refuse(opened, {} if all(map(is_in_pieces, outputs)) else outputs)
    _refuse(opened, parts_of_outputs(opened))
    adapters = sorted({adapted(key) for key in opened.tensors} - {""})
    changed = (
        []
        if has_output(opened.groups)
        else [entry for entry in adapters if is_output_entry(entry + ".")]
    )
    if changed or (not opened.groups and adapters and all(map(adapted, opened.tensors))):
        raise _of_an_adapter(opened, changed or adapters)
    if not opened.groups:
        single = opened.only_matrix()
        rows = len(opened.tensors[single]) if single is not None else 0
        larger = {k: v for k, v in opened.unread.items() if len(v.shape) > 1 and v.shape[0] >= rows}
        _refuse(opened, {key: entry.why for key, entry in larger.items()})
    elif opened.untied and not outputs and not has_output(opened.groups):
        if _WITH_OUTPUT.search(opened.arch or ""):
            raise CheckpointError(
                f"the output layer of {opened.arch}, which has a table of its own by the settings, "
                f"in {opened.name}",
                f"none under a known name beside {', '.join(names[0] for names in opened.groups)}",
                "Give the file that holds it, or choose a table with --table NAME.",
            )
    return list(outputs)


def _refuse(opened: Tables, unread: Mapping[str, str]) -> None:
    if unread:
        raise CheckpointError(
            f"a table that can be read in {opened.name}",
            listed([f"{name}: {why}" for name, why in unread.items()], separator="; "),
            "Save the model with floating-point numbers in one matrix, as it was before it was "
            "quantized or split, or choose another table with --table NAME.",
        )


def _of_an_adapter(opened: Tables, modules: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"whole tables in {opened.name}",
        f"an adapter, such as LoRA's, that changes {listed(modules)}",
        "Merge it into the model first (merge_and_unload() of peft), or choose the unchanged table "
        "with --table NAME.base_layer where the model has one.",
    )


def check_whole(opened: Tables, names: Sequence[str], wanted: Optional[str]) -> List[str]:
    """Refuse a part of a table, and a table that an adapter changes.

    Returns:
        Sentences that belong to the description of the choice.
    """
    changed = {adapted(key) for key in [*opened.tensors, *opened.unread]} - {""}
    asked = wanted is not None and "base_layer" in wanted.split(".")
    bare = [name.removesuffix(".base_layer") for name in names]
    if not asked and all(name in changed for name in bare):
        raise _of_an_adapter(opened, sorted({*bare}))
    rows, columns = opened.shape(names[0])
    remarks = [opened.remark] if opened.remark else []
    if any(key in (names[0], f"{names[0]}.weight") for key in opened.turned):
        remarks.append(f"It is stored as {columns} x {rows}, with a column for each word.")
    sizes, dim = opened.sizes, opened.settings.get("dim")
    if wanted is not None and not any(names[0] in known for known in opened.groups):
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


def unread_outputs(opened: Tables) -> Dict[str, str]:
    """What is stored of an output layer, but is not a table that can be read.

    Returns:
        Name -> what it is; empty where a table of an output layer can be read.
    """
    if has_output_beside(opened.groups):
        return {}
    sizes = {opened.shape(names[0])[0] for names in opened.groups} | {*opened.sizes}
    # DeepSpeed leaves parameters without numbers; other vectors are biases and scales.
    reasons = {
        key: unread.why
        for key, unread in opened.unread.items()
        if is_output_entry(key) and (len(unread.shape) > 1 or unread.shape == (0,))
    }
    for key, value in opened.tensors.items():
        if value.dim() < 2 or not is_output_entry(key):
            continue
        if is_in_pieces(key):
            reasons[key] = "a piece of an adaptive softmax"
        elif value.dtype not in FLOATING and (is_surely_output(key) or sizes & {*value.shape}):
            reasons[key] = f"quantized or packed numbers, {dtype_name(value)}"
        # Heads have other matrices of their own, and other heads, of images for example, as well.
        elif value.dtype in FLOATING and key.rpartition(".")[2] != "weight":
            if sizes & {*value.shape}:
                shape = " x ".join(map(str, value.shape))
                reasons[key] = f"{shape} numbers, from which W is computed"
    return reasons


def parts_of_outputs(opened: Tables) -> Dict[str, str]:
    """Output layers with a half, a quarter, ... of the rows of the input's table.

    An output layer with as many rows as the settings say is whole, and the larger table that of
    something else, such as all codebooks of an audio model.

    Returns:
        Name -> what it is.
    """
    inputs = {
        opened.shape(names[0])[0]
        for names in opened.groups
        if not any(is_output_entry(f"{name}.") or "encoder" in name.split(".") for name in names)
    }
    parts = {}
    for key, value in opened.tensors.items():
        if value.dim() == 2 and value.size(0) > value.size(1) and is_output_entry(key):
            whole = [rows for rows in inputs if rows in (value.size(0) * k for k in _DEVICES)]
            known = value.size(0) in inputs or value.size(0) in opened.sizes
            if whole and not known and not is_in_pieces(key):
                parts[key] = f"{value.size(0)} rows, a part of {whole[0]}"
    return parts
