"""What ``torch.save`` wrote: a fairseq checkpoint, or the state dicts of any other model.

Nothing in the file is executed: see :mod:`spectral_fairseq.checkpoints.reading`. Checksums are left
to the caller, since a model may be in several files of which one is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Mapping, Optional

from spectral_fairseq.checkpoints.dictionary import find_dictionary
from spectral_fairseq.checkpoints.reading import check_fairseq, read_torch_file, tensors_of
from spectral_fairseq.checkpoints.settings import checkpoint_settings
from spectral_fairseq.checkpoints.tensors import check_model
from spectral_fairseq.embeddings.entries import PADDING_ROW
from spectral_fairseq.errors import CheckpointError
from spectral_fairseq.formats.parts import check_declared
from spectral_fairseq.formats.state_dicts import check_of_all_processes, state_dict_of
from spectral_fairseq.formats.stored import Stored

# Of its present form, which is a zip archive, and of the one before.
_STARTS = (b"PK\x03\x04", b"\x80")
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
    if _is_fairseq(state):
        check_fairseq(state, path, stored_bytes)
        check_of_all_processes(state, tensors_of(state["model"]), path)
        check_declared(path, _processes(state))
        return _fairseq(state, path)
    tensors, unread = state_dict_of(state)
    settings: Mapping[str, Any] = {}
    if isinstance(state, dict):
        check_of_all_processes(state, tensors, path)
        check_declared(path, _processes(state))
        settings = checkpoint_settings(state, "args")
    if not tensors and not unread:
        shown = ", ".join(map(str, state)) if isinstance(state, dict) else type(state).__name__
        wanted = f"a state dict, alone or as an entry of a dictionary, in {path}"
        raise CheckpointError(wanted, shown[:300] or "nothing", "Save model.state_dict().")
    check_model(tensors, path, stored_bytes)
    # Other projects keep the largest size that a vocabulary may have under the usual names.
    padded = {k: v for k, v in settings.items() if k == "padded_vocab_size"}
    return Stored(str(path), tensors, unread, path, settings=padded)


def _is_fairseq(state: Any) -> bool:
    """Many projects save ``model`` beside ``args``; only fairseq's settings name a task."""
    if not (isinstance(state, dict) and isinstance(state.get("model"), dict)):
        return False
    task = checkpoint_settings(state, "task")
    has_task = "_name" in task or "task" in task
    return bool({"args", "cfg"} & {*state}) and (has_task or bool(_OF_FAIRSEQ & {*state}))


def _processes(state: Mapping[str, Any]) -> int:
    """Over how many processes a model is split, by the settings of one: 1 if they do not say."""
    settings = {**checkpoint_settings(state, "common"), **checkpoint_settings(state, "args")}
    settings["mp_world_size"] = state.get("mp_world_size")  # of DeepSpeed

    def size(name: str) -> int:
        return settings[name] if type(settings.get(name)) is int else 1

    of_megatron = size("tensor_model_parallel_size") * size("pipeline_model_parallel_size")
    return max(1, of_megatron, size("model_parallel_size"), size("mp_world_size"))


def _fairseq(checkpoint: Dict[str, Any], path: Path) -> Stored:
    tensors = tensors_of(checkpoint.pop("model"))
    checkpoint.pop("last_optimizer_state", None)
    history = checkpoint.get("optimizer_history") or [{}]
    last = history[-1] if isinstance(history[-1], dict) else {}
    iterator = (checkpoint.get("extra_state") or {}).get("train_iterator") or {}
    model = checkpoint_settings(checkpoint, "model")
    arch = model.get("_name") or model.get("arch")
    return Stored(
        str(path),
        tensors,
        file=path,
        find_words=lambda table, rows: find_dictionary(None, checkpoint, table, rows, path),
        uncounted=[PADDING_ROW],
        arch=None if arch is None else str(arch),
        epoch=_epoch(iterator),
        updates=_whole(last.get("num_updates")),
        checkpoint=checkpoint,
    )


def _epoch(iterator: Mapping[str, Any]) -> Optional[int]:
    """The epoch that was trained last. At the end of one, fairseq saves the number of the next."""
    epoch = _whole(iterator.get("epoch"))
    ended = iterator.get("iterations_in_epoch") == 0
    return epoch - 1 if epoch is not None and epoch > 1 and ended else epoch


def _whole(number: Any) -> Optional[int]:
    return None if number is None else int(number)
