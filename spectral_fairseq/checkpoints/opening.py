"""Opens whatever a path leads to; the format is recognised by the first bytes, not by the name."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Tuple, Union

import numpy as np
from torch import Tensor, nn

from spectral_fairseq.checkpoints import reading
from spectral_fairseq.checkpoints.config import padding_rows
from spectral_fairseq.checkpoints.dictionary import WordList, find_dictionary
from spectral_fairseq.checkpoints.reading import (
    READ_FAILURES,
    Unread,
    check_fairseq,
    read_json_object,
    read_torch_file,
    tensors_of,
)
from spectral_fairseq.checkpoints.saved import PART, WEIGHTS, model_path, weights_file
from spectral_fairseq.checkpoints.settings import checkpoint_settings
from spectral_fairseq.checkpoints.shards import (
    Shards,
    check_no_part,
    check_one_set,
    index_beside,
    joined,
    numbered_files,
)
from spectral_fairseq.checkpoints.state_dict import (
    check_of_all_processes,
    state_dict_of,
    without_adapters,
)
from spectral_fairseq.checkpoints.table_entries import may_be_table
from spectral_fairseq.checkpoints.tables import Tables
from spectral_fairseq.checkpoints.tensors import check_model
from spectral_fairseq.checkpoints.vectors import (
    looks_like_word_vectors,
    read_npy,
    read_npz,
    read_word_vectors,
    tensor_of,
)
from spectral_fairseq.checkpoints.vocabulary import words_beside
from spectral_fairseq.embeddings.entries import PADDING_ROW
from spectral_fairseq.errors import (
    CheckpointError,
    ConfigurationError,
    DamagedError,
    ForbiddenError,
    first_line,
    needs_extra,
)

# A safetensors file: its header is checked, and its tensors are mapped from the file.
#
# The safetensors package refuses headers longer than 100 MB or than the file, and tensors that
# overlap, leave gaps or end beyond the file. https://github.com/huggingface/safetensors describes
# the format.


def looks_like_safetensors(start: bytes) -> bool:
    """Whether a file begins with the length of a header, eight bytes, and a JSON object."""
    # The length of any real header has zero bytes, which text such as "3000 50" has not.
    return start[8:9] == b"{" and b"\0" in start[:8]


def read_safetensors(path: Path) -> Tuple[Dict[str, Tensor], Dict[str, Unread]]:
    """Name -> tensor, mapped from the file: only the pages that are used are read.

    The second mapping has the tensors of types that torch does not have.

    Raises:
        CheckpointError: it is not a whole file of this format.
        ConfigurationError: the safetensors package is not installed.
    """
    with needs_extra("models", "to read safetensors"):
        import safetensors
    tensors: Dict[str, Tensor] = {}
    unread: Dict[str, Unread] = {}
    try:
        with safetensors.safe_open(str(path), framework="pt", device="cpu") as file:
            for name in file.keys():
                try:
                    tensors[name] = file.get_tensor(name)
                except (safetensors.SafetensorError, AttributeError) as error:
                    piece = file.get_slice(name)
                    kind = f"numbers of type {piece.get_dtype()} ({first_line(error)})"
                    unread[name] = Unread(tuple(piece.get_shape()), kind)
        return tensors, unread
    except (safetensors.SafetensorError, *READ_FAILURES) as error:
        raise DamagedError(f"a safetensors file at {path}", first_line(error)) from error


# What ``torch.save`` wrote: a fairseq checkpoint, or the state dict of any other model.
#
# Nothing in the file is executed: see :mod:`spectral_fairseq.checkpoints.reading`. Checksums are
# left to the caller, since a model may be in several files of which one is needed.


ZIP, PICKLE = b"PK\x03\x04", b"\x80"
TORCH_STARTS = (ZIP, PICKLE)
"""The first bytes of what ``torch.save`` writes, in its present form and the one before."""

# What fairseq's trainer saves and other projects do not.
_OF_FAIRSEQ = {"optimizer_history", "task_state", "extra_state"}


def open_torch(path: Path) -> Tables:
    """Open a fairseq checkpoint or a state dict.

    Raises:
        CheckpointError: damaged, with objects that could run code, or neither of the two.
    """
    state, stored_bytes = read_torch_file(path, verify=False)
    if _is_fairseq(state):
        check_fairseq(state, path, stored_bytes)
        check_of_all_processes(state, tensors_of(state["model"]), path)
        return _fairseq(state, path)
    tensors, unread = _state_dict(state, path, stored_bytes)
    settings = checkpoint_settings(state, "args") if isinstance(state, dict) else {}
    return Tables(
        name=str(path),
        tensors=tensors,
        path=path,
        weights=path,
        unread=unread,
        # Other projects keep the largest size that a vocabulary may have under the usual names.
        settings={k: v for k, v in settings.items() if k == "padded_vocab_size"},
        declared_parts=_declared_parts(state) if isinstance(state, dict) else 1,
    )


def _is_fairseq(state: Any) -> bool:
    """Many projects save ``model`` beside ``args``; only fairseq's settings name a task."""
    if not (isinstance(state, dict) and isinstance(state.get("model"), dict)):
        return False
    task = checkpoint_settings(state, "task")
    has_task = "_name" in task or "task" in task
    return bool({"args", "cfg"} & {*state}) and (has_task or bool(_OF_FAIRSEQ & {*state}))


def _state_dict(
    state: Any, path: Path, stored_bytes: int
) -> Tuple[Dict[str, Tensor], Dict[str, Unread]]:
    tensors, unread = state_dict_of(state)
    if isinstance(state, dict):
        check_of_all_processes(state, tensors, path)
    if tensors or unread:
        check_model(tensors, path, stored_bytes)
        return tensors, unread
    shown = ", ".join(map(str, state)) if isinstance(state, dict) else type(state).__name__
    wanted = f"a state dict, alone or as an entry of a dictionary, in {path}"
    raise CheckpointError(wanted, shown[:300] or "nothing", "Save model.state_dict().")


def _epoch(iterator: Mapping[str, Any]) -> Optional[int]:
    """The epoch that was trained last. At the end of one, fairseq saves the number of the next."""
    epoch = _whole(iterator.get("epoch"))
    ended = iterator.get("iterations_in_epoch") == 0
    return epoch - 1 if epoch is not None and epoch > 1 and ended else epoch


def _declared_parts(state: Any) -> int:
    """In how many files a model is by the settings in one of them: 1 if they do not say."""
    settings = {**checkpoint_settings(state, "common"), **checkpoint_settings(state, "args")}
    settings["mp_world_size"] = state.get("mp_world_size")  # of DeepSpeed

    def size(name: str) -> int:
        return settings[name] if type(settings.get(name)) is int else 1

    of_megatron = size("tensor_model_parallel_size") * size("pipeline_model_parallel_size")
    return max(1, of_megatron, size("model_parallel_size"), size("mp_world_size"))


def _fairseq(checkpoint: Dict[str, Any], path: Path) -> Tables:
    tensors = tensors_of(checkpoint.pop("model"))
    checkpoint.pop("last_optimizer_state", None)
    history = checkpoint.get("optimizer_history") or [{}]
    last = history[-1] if isinstance(history[-1], dict) else {}
    iterator = (checkpoint.get("extra_state") or {}).get("train_iterator") or {}
    model = checkpoint_settings(checkpoint, "model")
    arch = model.get("_name") or model.get("arch")
    return Tables(
        name=str(path),
        tensors=tensors,
        path=path,
        weights=path,
        find_words=lambda table, rows: find_dictionary(None, checkpoint, table, rows, path),
        uncounted=[PADDING_ROW],
        arch=None if arch is None else str(arch),
        epoch=_epoch(iterator),
        updates=_whole(last.get("num_updates")),
        checkpoint=checkpoint,
        declared_parts=_declared_parts(checkpoint),
    )


def _whole(number: Any) -> Optional[int]:
    return None if number is None else int(number)


# The folder of a model of Hugging Face's libraries: its weights, settings, words and progress.


def open_weights(weights: Path, path: Path) -> Tables:
    """Open weights together with what stands beside them.

    Raises:
        CheckpointError: the weights are damaged, or files are missing.
        DataError: the settings are not JSON.
    """
    folder = weights.parent
    tensors, unread = read_weights(weights)
    # Llama and Mistral have params.json beside the files of their own form.
    config = _settings(folder / "config.json") or _settings(folder / "params.json")
    state = _settings(folder / "trainer_state.json")
    names = config.get("architectures")
    arch = names[0] if isinstance(names, list) and names else config.get("model_type")
    epoch, updates = state.get("epoch"), state.get("global_step")
    return Tables(
        name=str(path),
        tensors=tensors,
        path=path,
        weights=weights,
        find_words=partial(words_beside, folder, str(path)),
        unread=unread,
        settings=config,
        uncounted=padding_rows(config),
        arch=None if arch is None else str(arch),
        # Python's json reads NaN and Infinity.
        epoch=int(epoch) if isinstance(epoch, (int, float)) and math.isfinite(epoch) else None,
        updates=updates if isinstance(updates, int) else None,
    )


def read_weights(weights: Path) -> Tuple[Mapping[str, Tensor], Dict[str, Unread]]:
    """The tensors of one file, or of all that an index names, and those that are not read.

    Raises:
        CheckpointError: a file is damaged, or missing.
    """
    if not weights.name.endswith(".index.json"):
        return _read_tensors(weights)
    tensors = Shards(weights, _read_tensors)
    return tensors, tensors.leave_out_unread()


def _read_tensors(file: Path) -> Tuple[Mapping[str, Tensor], Dict[str, Unread]]:
    """The tensors of one file: *.safetensors is what it is called, others have been either."""
    with open(file, "rb") as opened:
        start = opened.read(9)
    if file.suffix == ".safetensors" or looks_like_safetensors(start):
        return read_safetensors(file)
    state, stored_bytes = read_torch_file(file, verify=False)
    return _state_dict(state, file, stored_bytes)


def _settings(file: Path) -> Dict[str, Any]:
    return read_json_object(file, "settings of the model") if os.path.isfile(file) else {}


_NPY = b"\x93NUMPY"
_START_BYTES = 1 << 16


def may_be_torch_file(path: Union[str, Path]) -> bool:
    """Whether a file begins as ``torch.save`` writes it; false for a folder.

    It is true for a file that cannot be read, of which :func:`open_model` says why.
    """
    file = model_path(path)
    if os.path.isdir(file):
        return False
    try:
        with open(file, "rb") as opened:
            return opened.read(4).startswith(TORCH_STARTS)
    except PermissionError:
        return True


def open_model(path: Union[str, Path]) -> Tables:
    """Open a model or a table in any format that is known.

    Args:
        path: a fairseq checkpoint, a state dict of torch, a safetensors file, the index of several
            files, a model's folder, .npy, .npz, or word vectors of word2vec, fastText or GloVe.

    Raises:
        CheckpointError: missing, damaged, or none of these.
        DataError: of one of these formats, with content that cannot be.
        ConfigurationError: a package that reads the format is not installed.
    """
    named = model_path(path)
    file = weights_file(named) if os.path.isdir(named) else named
    assert file is not None
    if file is not named:
        check_one_set(file)
    else:
        index = index_beside(file)
        if index is not None:
            model = _open(index, named)
            return replace(model, remark=f"Read from the files that {index.name} names.")
    files = numbered_files(file)
    opened = [_open(one, named) for one in files]
    model = opened[files.index(file)]
    if len(files) == 1:
        check_no_part(file, model.declared_parts)
        return model
    tensors, unread, places = joined(files, [tables.tensors for tables in opened])
    for tables in opened:
        unread.update(tables.unread)
    return replace(
        model,
        tensors=tensors,
        unread=unread,
        files=places,
        remark=f"Read from {len(files)} files, {files[0].name} and those that belong to it.",
    )


def _open(file: Path, named: Path) -> Tables:
    """Open one file of the model that was named."""
    try:
        with open(file, "rb") as opened:
            start = opened.read(_START_BYTES)
    except PermissionError as error:
        raise ForbiddenError(f"a readable file at {file}", str(error)) from error
    of_model = file.name in WEIGHTS or PART.fullmatch(file.name) or file.suffix == ".safetensors"
    if of_model or looks_like_safetensors(start):
        return open_weights(file, named)
    if start.startswith(_NPY):
        return _table(file, read_npy(file))
    if start.startswith(ZIP):
        if _holds_arrays(file):
            return _table(file, *read_npz(file))
        return open_torch(file)
    if start.startswith(PICKLE):
        return open_torch(file)
    if looks_like_word_vectors(start):
        return _vectors(file)
    raise CheckpointError(
        f"a model or a table of word vectors at {file}",
        f"a file that starts with {start[:16]!r}" if start else "an empty file",
        "Known are fairseq checkpoints, state dicts of torch, safetensors, .npy, .npz, word2vec, "
        "GloVe and folders of Hugging Face models. If it is compressed, unpack it first.",
    )


def _holds_arrays(file: Path) -> bool:
    try:
        names = [entry.filename for entry in reading.entries(file)]
    except READ_FAILURES:
        return file.suffix == ".npz"
    return any(name.endswith(".npy") for name in names) or (not names and file.suffix == ".npz")


def _table(
    file: Path, tensors: Dict[str, Tensor], unread: Optional[Dict[str, Unread]] = None
) -> Tables:
    return Tables(str(file), tensors, path=file, weights=file, unread=unread or {})


def _vectors(file: Path) -> Tables:
    symbols, weight = read_word_vectors(file)
    words = WordList(file, symbols, [0] * len(symbols), [])
    model = _table(file, {"vectors": weight})
    return replace(model, find_words=lambda *_: (words, "stored with the vectors"))


# A model or a table in memory: a tensor, an array, a state dict or a torch module.


def open_memory(model: Any) -> Tables:
    """Take the tensors of a model; nothing is copied, but for a table that LoRA changes.

    Args:
        model: a tensor or an array of shape (N, d); a mapping from names to tensors, such as a
            state dict; or a module.

    Raises:
        ConfigurationError: anything else, a model without its weights, or one whose parameters
            FSDP splits over processes.
    """
    kind = type(model).__name__
    opened = _module(model, kind) if isinstance(model, nn.Module) else _tensors(model, kind)
    if any(tensor.device.type == "meta" for tensor in opened.tensors.values()):
        found = "tensors on the device meta"
        raise ConfigurationError(f"the weights of {opened.name}", found, "Load them first.")
    return opened


def _tensors(model: Any, kind: str) -> Tables:
    if isinstance(model, np.ndarray):
        model = tensor_of(model, f"the {kind}")
    named = {"tensor": model} if isinstance(model, Tensor) else model
    tensors, unread = state_dict_of(named) if isinstance(named, Mapping) else ({}, {})
    if not tensors and not unread:
        raise ConfigurationError(
            "a path, a tensor, an array, a state dict or a torch module",
            f"an object of type {kind}",
            "Pass model.state_dict(), or the table itself.",
        )
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    return Tables(name=f"the {kind}", tensors=tensors, unread=unread)


def _module(model: nn.Module, kind: str) -> Tables:
    # Its state_dict() waits for the other processes, which may not call it.
    if any(type(layer).__name__ == "FullyShardedDataParallel" for layer in model.modules()):
        raise ConfigurationError(
            f"a module that holds its parameters, as the {kind}",
            "parameters that FSDP splits over processes",
            "Take a full state dict in all processes (StateDictType.FULL_STATE_DICT), and pass it.",
        )
    # Detaching may be left to the tensors that can be read: others answer with communication.
    state = model.state_dict(keep_vars=True)
    tensors, unread = state_dict_of(state)
    tensors = without_adapters(model, {name: tensor.detach() for name, tensor in tensors.items()})
    inputs = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Embedding)
    }
    words = {
        k: layer for k, layer in inputs.items() if may_be_table(k, *layer.weight.shape)
    } or inputs
    config = getattr(getattr(model, "module", model), "config", None)
    settings: Any = {}
    if config is not None and hasattr(config, "to_dict"):  # of transformers
        settings = config.to_dict()
        padding = padding_rows(settings)
    else:
        padding = sorted(
            {layer.padding_idx for layer in words.values() if layer.padding_idx is not None}
        )
    return Tables(
        name=f"the module {kind}",
        tensors=tensors,
        default_table=next(iter(inputs)) or "weight" if len(inputs) == 1 else None,
        uncounted=padding,
        arch=kind,
        unread=unread,
        settings=settings,
    )
