"""Methods of a saved model, put on again after it was loaded.

``save_pretrained`` of a model with a table writes the plain weights, which transformers loads as
ever, and beside them the entries of the table; the settings name the methods. :func:`restore_`
reads the settings, does the same to the loaded model and takes the entries from the file, from
which training goes on exactly.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Union

import torch
from torch import Tensor, nn

from spectral_fairseq.checkpoints.saved import weights_file
from spectral_fairseq.embeddings import SVDEmbedding, WeightNormEmbedding
from spectral_fairseq.embeddings.table import FactoredEmbedding
from spectral_fairseq.errors import CheckpointError, ConfigurationError, listed
from spectral_fairseq.formats.opening import open_model
from spectral_fairseq.training.hidden_states import KeepsHiddenStates
from spectral_fairseq.training.joining import joined_state
from spectral_fairseq.training.layer_mixins import take_off
from spectral_fairseq.training.losses import check_has_plain_form, fused_loss_, mixture_, plain_
from spectral_fairseq.training.mixture_layer import MixtureLayer
from spectral_fairseq.training.output_layer import output_layer, without_wrappers, wrapped
from spectral_fairseq.training.replaced_methods import RECORD, plain_entries, record_of
from spectral_fairseq.training.tables import factor_, weight_norm_
from spectral_fairseq.training.token_loss import TokenLoss

_TABLES: Dict[str, Any] = {WeightNormEmbedding.kind: weight_norm_, SVDEmbedding.kind: factor_}
_OF_METHOD = re.compile(r"\.((?:table|mixture)\..*)")
_ENTRIES = "the entries of the methods that the model's settings name"
_AS_SAVED = "Give the folder that save_pretrained wrote."


def restore_(
    model: nn.Module, folder: Optional[Union[str, Path]] = None, **options: Any
) -> Optional[TokenLoss]:
    """Put the methods back on a model that was saved with them and loaded by ``from_pretrained``.

    Args:
        model: loaded, and changed in place. Make the optimiser afterwards.
        folder: where it was saved; ``None`` takes the one that it was loaded from, for a model of
            the hub that into which it was downloaded.
        **options: of :class:`TokenLoss`, where the model has a mixture or a soft cap.

    Returns:
        The loss of a mixture or of capped logits; ``None`` for a table alone, or for a model whose
        settings name no method.

    Raises:
        ConfigurationError: the folder is not known, the model has its methods already or another
            output table than the folder (it was trained or resized since), or options of a loss
            that is not made.
        CheckpointError: the folder lacks the entries of a method.
    """
    config: Any = getattr(without_wrappers(model), "config", None)
    record = dict(getattr(config, RECORD, None) or {})
    there = record_of(model)
    if there:
        found = f"one that has {', '.join(there)}"
        remedy = "Load it again, or go on with it as it is."
        raise ConfigurationError("a model as from_pretrained loads it", found, remedy)
    makes_loss = "mixture" in record or "softcap" in record
    if options and not makes_loss:
        wanted = "options of a loss for a model with a mixture or a soft cap alone"
        remedy = "Call fused_loss_ with them afterwards."
        raise ConfigurationError(wanted, ", ".join(options), remedy)
    if not record:
        return None
    entries = _entries(_folder(config, folder))
    if {"table", "mixture"} & {*record} and not any(map(_entry_of, entries)):
        raise CheckpointError(
            _ENTRIES,
            f"none for {listed([*record])}, so it was saved again as a plain model",
            "Go on with it as it is, or put a method on it anew, such as with weight_norm_; "
            f"delete `{RECORD}` from its config.json.",
        )
    _check_unchanged(model, entries)
    weight: Any = output_layer(model).weight
    try:
        if "table" in record:
            settings = dict(record["table"])
            _TABLES[settings.pop("kind")](model, **settings)
        loss = _loss_on(model, record, options)
        _load_entries(model, entries)
    except Exception:  # what is refused leaves the model as it was loaded
        _take_off(model, weight)
        setattr(config, RECORD, record)
        raise
    return loss


def _load_entries(model: nn.Module, entries: Mapping[str, Tensor]) -> None:
    """Give tables and mixtures what they were saved with.

    Raises:
        CheckpointError: an entry is missing, or has another shape.
    """
    state = model.state_dict()
    needed = [name for name in state if _entry_of(name)]
    # Some parts of a model, such as those of LLaVA, have other names in its file.
    in_file = {_entry_of(name): entries[name] for name in entries if _entry_of(name)}
    found: Dict[str, Any] = {
        name: entries.get(name, in_file.get(_entry_of(name))) for name in needed
    }
    missing = [name for name, entry in found.items() if entry is None]
    if missing:
        raise CheckpointError(_ENTRIES, f"none for {listed(missing)}", _AS_SAVED)
    for name, entry in found.items():
        shape, there = tuple(state[name].shape), tuple(entry.shape)
        if shape != there:
            raise CheckpointError(f"{_ENTRIES}; {name} of shape {shape}", f"{there}", _AS_SAVED)
    model.load_state_dict(found, strict=False)


def _take_off(model: nn.Module, weight: Tensor) -> None:
    """Take off what was put on, also what no plain model has, and give ``weight`` back."""
    for layer in model.modules():
        if isinstance(layer, MixtureLayer):
            take_off(layer, MixtureLayer)
            del layer.mixture
        if isinstance(layer, KeepsHiddenStates):
            layer.__dict__.pop("softcap", None)
    plain_(model)
    plain: Any = output_layer(model).weight
    plain.data.copy_(weight)


def _entry_of(name: str) -> str:
    """What follows the layer in the name of a method's entry, such as table.U; else nothing."""
    found = _OF_METHOD.search(name)
    return found.group(1) if found else ""


def _loss_on(
    model: nn.Module, record: Mapping[str, Any], options: Mapping[str, Any]
) -> Optional[TokenLoss]:
    """Put a mixture or a soft cap on, and return its loss; ``None`` for a table alone."""
    if "mixture" in record:
        settings = dict(record["mixture"])
        return mixture_(model, settings.pop("components"), **settings, **options)
    if "softcap" in record:
        return fused_loss_(model, softcap=record["softcap"], **options)
    return None


def plain_state_dict(model: nn.Module) -> Dict[str, Tensor]:
    """The state dict of the plain model that a model with a table stands for.

    The model stays as it is, and may be split by ``fully_shard``; then every worker has to call
    this. Tied layers have the same tensor.

        state = plain_state_dict(model)
        if state:
            plain_model.load_state_dict(state)  # or torch.save, or save_file

    Args:
        model: with tables of ``weight_norm_`` or ``factor_``, or with none.

    Returns:
        Whole tensors in the memory of the CPU, on the first worker; nothing on the others.

    Raises:
        UnsupportedError: a mixture or a soft cap, which no plain model has.
    """
    inner = wrapped(model)
    if inner is not None:
        return plain_state_dict(inner)
    check_has_plain_form(model)
    state = joined_state(model)
    if not state:
        return {}
    plain = plain_entries(model, state)
    tables = [name for name, part in model.named_modules() if isinstance(part, FactoredEmbedding)]
    factors = tuple(f"{name}." for name in tables)
    kept = {name: entry for name, entry in state.items() if not name.startswith(factors)}
    return {**kept, **plain}


def _check_unchanged(model: nn.Module, entries: Mapping[str, Tensor]) -> None:
    """Refuse a model whose output table is no longer that of the file.

    What it has learned since would be lost, since the entries of the file stand for the table as it
    was. The file has the plain weights too, under one of the names of the layers that share them.

    Raises:
        ConfigurationError: it was trained, resized or loaded from elsewhere.
    """
    weight: Any = output_layer(model).weight
    names = [
        f"{name}.weight"
        for name, layer in model.named_modules()
        if layer._parameters.get("weight") is weight
    ]
    names += [f"{name[: -len(entry) - 1]}.weight" for name in entries if (entry := _entry_of(name))]
    saved = next((entries[name] for name in names if name in entries), None)
    if saved is None or weight.is_meta:
        return
    if saved.shape != weight.shape:
        found = f"one of shape {tuple(weight.shape)}, where the file has {tuple(saved.shape)}"
    elif not torch.equal(saved.to(weight.dtype), weight.detach().cpu()):
        found = "one with other numbers, as after training"
    else:
        return
    raise ConfigurationError(
        "a model with the output table of the file, for restore_",
        found,
        "Call restore_ right after from_pretrained; or go on from the table as it is now with "
        "weight_norm_(model) or factor_(model).",
    )


def _folder(config: Any, folder: Optional[Union[str, Path]]) -> Path:
    name = str(getattr(config, "_name_or_path", "") if folder is None else folder)
    if os.path.isfile(Path(name) / "config.json"):
        return Path(name)
    if folder is None:
        with contextlib.suppress(ImportError, OSError, ValueError):  # no name, or not downloaded
            cached_file = importlib.import_module("transformers.utils").cached_file
            options = {"revision": getattr(config, "_commit_hash", None), "local_files_only": True}
            return Path(cached_file(name, "config.json", **options)).parent
    raise ConfigurationError(
        "the `folder` of the saved model, for restore_",
        f"{name!r} with no config.json",
        f"{_AS_SAVED} Of a model of the hub, huggingface_hub.snapshot_download(name) returns it.",
    )


def _entries(folder: Path) -> Mapping[str, Tensor]:
    weights = weights_file(folder)  # the one that transformers has loaded
    if weights is None:
        wanted = "model.safetensors or pytorch_model.bin"
        raise CheckpointError(wanted, f"neither in {folder}", _AS_SAVED)
    return open_model(weights).tensors
