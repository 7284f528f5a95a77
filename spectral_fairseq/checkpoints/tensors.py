"""What every tool may rely on in the tensors of a checkpoint that was read."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence

import torch

from spectral_fairseq.checkpoints.settings import by_name
from spectral_fairseq.errors import CheckpointError, NotFairseqError
from spectral_fairseq.functional.row_blocks import same_values

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_model(model: Mapping[Any, Any], path: Any, stored_bytes: int) -> None:
    """Check a checkpoint's entry ``model``.

    Args:
        model: name -> tensor; the ``_extra_state`` of modules, torch's ``get_extra_state``, may be
            anything.
        path: where it was read from, for messages.
        stored_bytes: what all tensors of the file can have in all.

    Raises:
        CheckpointError: it is not a mapping of names to dense tensors on the CPU, or a tensor is
            larger than the file, or its numbers are of a type that nothing here computes with.
    """
    for name, tensor in model.items():
        if not isinstance(name, str) or not (
            isinstance(tensor, torch.Tensor) or name.rpartition(".")[2] == "_extra_state"
        ):
            raise NotFairseqError(
                f"names and tensors, as in a fairseq checkpoint, in the entry 'model' of {path}",
                f"{name!r} with a value of type {type(tensor).__name__}",
            )
        if isinstance(tensor, torch.Tensor):
            wrong = _what_is_wrong(tensor, stored_bytes)
            if wrong is not None:
                raise CheckpointError(
                    f"a dense tensor of numbers for {name} in {path}",
                    wrong,
                    "Give a checkpoint as the training saved it.",
                )


def _what_is_wrong(tensor: torch.Tensor, stored_bytes: int) -> Any:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return "a quantized tensor" if tensor.is_quantized else "a sparse tensor"
    if tensor.device.type != "cpu":
        return f"one on the device {tensor.device.type}, without its numbers"
    if tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype not in FLOATING):
        return f"one of {tensor.dtype}"
    if tensor.numel() * tensor.element_size() > stored_bytes:
        shape = " x ".join(map(str, tensor.shape))
        return f"one of {shape} numbers, more than the file holds"
    return None


# The modules that hold one table, by the setting that shares it and its value.
_OUTPUT = ("decoder.output_projection", "decoder.output_projection.table", "decoder.fc3")
_DECODER = ("decoder.embed_tokens", *_OUTPUT)
_SHARED = (
    ("share_all_embeddings", True, ("encoder.embed_tokens", *_DECODER)),
    ("share_decoder_input_output_embed", True, _DECODER),
    ("share_input_output_embed", True, _DECODER),  # of fconv
    (
        "untie_weights_roberta",
        False,
        ("encoder.sentence_encoder.embed_tokens", "encoder.lm_head"),
    ),
)


def check_shared_tables(state: Mapping[str, Any], path: Any) -> None:
    """Refuse a table that has different values under its names, of which only one can be right.

    Raises:
        CheckpointError: the settings share a table, and its copies in the file are not equal.
    """
    nodes = [state.get("args"), (state.get("cfg") or {}).get("model")]
    values = [by_name(part) or {} for part in nodes]
    for setting, shares, modules in _SHARED:
        if not any(part.get(setting) is shares for part in values):
            continue
        entries: Dict[str, List[str]] = {}
        for key in state["model"]:
            module, _, entry = key.rpartition(".")
            # A head has a bias, and RoBERTa's a layer norm, which no input table has.
            if module in modules and entry != "bias":
                entries.setdefault(entry, []).append(key)
        for names in entries.values():
            refuse_unequal(
                state["model"],
                names,
                f"in {path}, which share one table by {setting}",
                "The file is damaged, or another program has changed one of the two: take the "
                "checkpoint as the training saved it.",
            )


def refuse_unequal(tensors: Mapping[str, Any], names: Sequence[str], why: str, remedy: str) -> None:
    """Raise an error unless the entries of some names, which share a table, hold the same numbers.

    Args:
        tensors: name -> tensor.
        names: of the entries.
        why: they share it, for the message.
        remedy: what to do where they differ.

    Raises:
        CheckpointError: they differ.
    """
    for name in names[1:]:
        if not same_values(tensors[name], tensors[names[0]]):
            raise CheckpointError(f"{name} to equal {names[0]} {why}", "different values", remedy)
