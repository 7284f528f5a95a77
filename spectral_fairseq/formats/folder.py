"""What stands beside the weights in a model's folder: its settings, its words and its progress."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Optional

from spectral_fairseq.errors import DamagedError
from spectral_fairseq.files import read_json_object
from spectral_fairseq.formats.config import ModelConfig
from spectral_fairseq.formats.stored import Stored
from spectral_fairseq.formats.words import words_beside


def with_neighbours(stored: Stored, folder: Path, name: str) -> Stored:
    """The same model with what the files of Hugging Face's libraries in its folder say.

    Args:
        stored: read from weights in the folder.
        folder: that of the weights.
        name: of the model, for messages.

    Raises:
        DataError: a config.json that is no JSON; another file may belong to another program.
    """
    remarks = [stored.remark] if stored.remark else []
    settings = _settings(folder / "config.json")
    # Llama and Mistral have params.json beside the files of their own form.
    settings = settings or _settings(folder / "params.json", remarks)
    config = ModelConfig.of(settings)
    state = _settings(folder / "trainer_state.json", remarks)
    names = settings.get("architectures")
    arch = names[0] if isinstance(names, list) and names else settings.get("model_type")
    epoch, updates = state.get("epoch"), state.get("global_step")
    return replace(
        stored,
        find_words=partial(words_beside, folder, name),
        config=config if settings else stored.config,
        uncounted=config.padding,
        arch=None if arch is None else str(arch),
        # Python's json reads NaN and Infinity.
        epoch=int(epoch) if isinstance(epoch, (int, float)) and math.isfinite(epoch) else None,
        updates=updates if isinstance(updates, int) else None,
        remark=" ".join(remarks),
    )


def _settings(file: Path, remarks: Optional[List[str]] = None) -> Dict[str, Any]:
    """What a file says, if it is there; given ``remarks``, one says why it is left out."""
    try:
        return read_json_object(file, "settings of the model") if os.path.isfile(file) else {}
    except DamagedError as error:
        if remarks is None:
            raise
        remarks.append(f"{file.name} beside it was left out: {error.found}.")
        return {}
