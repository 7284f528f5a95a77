"""The folder of a model of Hugging Face's libraries: its weights, settings, words and progress."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Tuple

from torch import Tensor

from spectral_fairseq.checkpoints.dictionary import WordList
from spectral_fairseq.checkpoints.formats.json_file import read_json_object
from spectral_fairseq.checkpoints.formats.opened import OpenedModel, padding_rows
from spectral_fairseq.checkpoints.formats.safetensors_file import (
    looks_like_safetensors,
    read_safetensors,
)
from spectral_fairseq.checkpoints.formats.shards import Shards
from spectral_fairseq.checkpoints.formats.torch_file import read_state_dict
from spectral_fairseq.checkpoints.formats.vocabulary import (
    fit_remark,
    fitted,
    read_vocabulary,
    vocabulary_file,
)
from spectral_fairseq.checkpoints.tables import Unread
from spectral_fairseq.errors import ConfigurationError, DataError


def open_weights(weights: Path, path: Path) -> OpenedModel:
    """Open weights together with what stands beside them.

    Args:
        weights: a file of tensors, or the index of several.
        path: as the user named it, the file or its folder.

    Raises:
        CheckpointError: the weights are damaged, or files are missing.
        DataError: the settings are not JSON.
    """
    folder = weights.parent
    in_several = weights.name.endswith(".index.json")
    tensors: Mapping[str, Tensor]
    unread: Dict[str, Unread] = {}
    if in_several:
        tensors = Shards(weights, _read_tensors)
        unread = tensors.leave_out_unread()
    else:
        tensors, unread = _read_tensors(weights)
    # Llama and Mistral have params.json beside the files of their own form.
    config = _settings(folder / "config.json") or _settings(folder / "params.json")
    state = _settings(folder / "trainer_state.json")
    names = config.get("architectures")
    arch = names[0] if isinstance(names, list) and names else config.get("model_type")
    epoch, updates = state.get("epoch"), state.get("global_step")
    return OpenedModel(
        name=str(path),
        tensors=tensors,
        path=path,
        weights=weights,
        find_words=partial(_words_beside, folder, str(path)),
        unread=unread,
        settings=config,
        uncounted=padding_rows(config),
        arch=None if arch is None else str(arch),
        # Python's json reads NaN and Infinity.
        epoch=int(epoch) if isinstance(epoch, (int, float)) and math.isfinite(epoch) else None,
        updates=updates if isinstance(updates, int) else None,
    )


def _read_tensors(file: Path) -> Tuple[Mapping[str, Tensor], Dict[str, Unread]]:
    """The tensors of one file: *.safetensors is what it is called, others have been either."""
    with open(file, "rb") as opened:
        start = opened.read(9)
    if file.suffix == ".safetensors" or looks_like_safetensors(start):
        return read_safetensors(file)
    return read_state_dict(file)


def _settings(file: Path) -> Dict[str, Any]:
    return read_json_object(file, "settings of the model") if os.path.isfile(file) else {}


def _words_beside(
    folder: Path, model: str, table: str, rows: int
) -> Tuple[Optional[WordList], str]:
    file = vocabulary_file(folder, "encoder" not in table.split("."))
    if file is None:
        return None, "no tokenizer.json, vocab.json, vocab.txt or sentencepiece model beside it"
    try:
        words = read_vocabulary(file)
        remark = fit_remark(words, rows, "found beside the model")
        return fitted(words, rows, table, model), remark
    except (ConfigurationError, DataError) as error:
        return (
            None,
            f"{file.name} could not be used: it needed {error.expected}, and found {error.found}",
        )
