"""What ``torch.save`` wrote: a fairseq checkpoint, or the state dicts of any other model.

Nothing in the file is executed: see :mod:`spectral_fairseq.checkpoints.reading`. Checksums are left
to the caller, since a model may be in several files of which one is needed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Mapping

from spectral_fairseq.checkpoints.archive import ZIP
from spectral_fairseq.checkpoints.dictionary import find_dictionary
from spectral_fairseq.checkpoints.reading import read_torch_file, tensors_of
from spectral_fairseq.checkpoints.settings import check_settings, checkpoint_settings
from spectral_fairseq.checkpoints.tensors import check_model, check_shared_tables
from spectral_fairseq.embeddings.entries import PADDING_ROW
from spectral_fairseq.errors import CheckpointError
from spectral_fairseq.formats.config import ModelConfig
from spectral_fairseq.formats.state_dicts import check_saved_whole, state_dict_of
from spectral_fairseq.formats.stored import Stored, Unread, find_listed_words

# Of its present form, which is a zip archive, and of the one before.
_STARTS = (ZIP, b"\x80")
# What fairseq's trainer saves and other projects do not.
_OF_FAIRSEQ = {"optimizer_history", "task_state", "extra_state"}


def recognise(start: bytes) -> bool:
    """Whether a file begins as ``torch.save`` writes it."""
    return start.startswith(_STARTS)


def read(path: Path) -> Stored:
    """A fairseq checkpoint or a state dict.

    Raises:
        CheckpointError: damaged, with objects that could run code, neither of the two, or the part
            of a model that one of several processes has.
    """
    state, stored_bytes = read_torch_file(path, verify=False)
    whole = state if isinstance(state, dict) else {}
    # Many projects save ``model`` beside ``args``; only fairseq's settings name a task.
    names_task = "_name" in checkpoint_settings(whole, "task") or bool(_OF_FAIRSEQ & {*whole})
    of_fairseq = names_task and bool({"args", "cfg"} & {*whole})
    of_fairseq = of_fairseq and isinstance(whole.get("model"), dict)
    unread: Mapping[str, Unread] = {}
    if of_fairseq:
        check_settings(whole, path)
        tensors = tensors_of(whole["model"])
    else:
        tensors, unread = state_dict_of(state)
    common, args = (checkpoint_settings(whole, node) for node in ("common", "args"))
    check_saved_whole(path, whole, tensors, {**common, **args})
    check_model(whole["model"] if of_fairseq else tensors, path, stored_bytes)
    if of_fairseq:
        check_shared_tables(whole, path)
    if not tensors and not unread:
        shown = ", ".join(map(str, whole)) if whole else type(state).__name__
        wanted = f"a state dict, alone or as an entry of a dictionary, in {path}"
        raise CheckpointError(wanted, shown[:300] or "nothing", "Save model.state_dict().")
    stored = Stored(str(path), tensors, unread, path)
    if of_fairseq:
        return _of_training(stored, whole)
    # Other projects keep the largest size that a vocabulary may have under the usual names.
    padded = {name: size for name, size in args.items() if name == "padded_vocab_size"}
    config = ModelConfig.of(padded)
    # torchtext stores the words as the list ``itos``.
    beside = state.values() if isinstance(state, dict) else state
    listed = beside if isinstance(state, (dict, list, tuple)) else ()
    return replace(stored, config=config, find_words=partial(find_listed_words, listed))


def _of_training(stored: Stored, checkpoint: Mapping[str, Any]) -> Stored:
    """The model of a fairseq checkpoint, with what that says of its words and its training."""
    nodes = ("criterion", "model", "task")
    training = {node: checkpoint_settings(checkpoint, node) for node in nodes}
    arch = training["model"].get("_name")
    history = checkpoint.get("optimizer_history") or [{}]
    last = history[-1] if isinstance(history[-1], dict) else {}
    iterator = (checkpoint.get("extra_state") or {}).get("train_iterator") or {}
    epoch, updates = iterator.get("epoch"), last.get("num_updates")
    if epoch is not None and epoch > 1 and iterator.get("iterations_in_epoch") == 0:
        epoch -= 1  # at the end of an epoch, fairseq saves the number of the next
    return replace(
        stored,
        find_words=partial(find_dictionary, None, training["task"], path=stored.file),
        uncounted=[PADDING_ROW],
        arch=None if arch is None else str(arch),
        epoch=None if epoch is None else int(epoch),
        updates=None if updates is None else int(updates),
        training=training,
    )
