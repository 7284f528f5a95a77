"""Load a language model from a checkpoint, or explain why it cannot be evaluated."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Union

from fairseq import checkpoint_utils
from fairseq.models import FairseqLanguageModel

import spectral_fairseq.plugin  # noqa: F401  registers the architectures that a checkpoint names
from spectral_fairseq.checkpoints.dictionary import checkpoint_settings
from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.errors import (
    CheckpointError,
    DataError,
    MissingDataError,
    SpectralFairseqError,
    UnsupportedError,
)
from spectral_fairseq.provenance import sha256
from spectral_fairseq.tools.language_models.overrides import check_overrides

# At most 64 MiB of float32 scores for the blocks that are run together.
_BATCH_SCORES = 16 * 2**20


@dataclass
class LanguageModel:
    """The model of a checkpoint and how it was trained.

    Attributes:
        model: in evaluation mode, float32.
        dictionary: of the data.
        stateful: whether it passes a state from one segment to the next.
        arch: name of its architecture.
        settings: settings of its task, with the overrides.
        sha256: hash of the checkpoint.
        dictionary_sha256: hash of dict.txt.
        remark: why the dictionary may be the wrong one; None if nothing suggests it.
    """

    model: Any
    dictionary: Any
    stateful: bool
    arch: str
    settings: Dict[str, Any]
    sha256: str
    dictionary_sha256: str
    remark: Optional[str]

    @property
    def padding(self) -> int:
        """Index of the padding symbol."""
        return int(self.dictionary.pad())

    @property
    def start(self) -> int:
        """Index of the symbol that precedes a corpus, the end of a sentence."""
        return int(self.dictionary.eos())

    def rows(self, block: int) -> int:
        """Number of blocks to run together, so that their scores fit in 64 MiB."""
        return int(min(64, max(1, _BATCH_SCORES // (block * len(self.dictionary)))))


def load_language_model(
    path: Union[str, Path],
    data: Union[str, Path],
    overrides: Mapping[str, Any],
    verify: bool = True,
) -> LanguageModel:
    """Build the model of a checkpoint, on the CPU.

    Args:
        path: saved by ``fairseq-train``.
        data: folder of binarised data with the dictionary of the training.
        overrides: settings that replace those of the training.
        verify: as of :func:`~spectral_fairseq.checkpoints.reading.load_checkpoint`.

    Raises:
        CheckpointError: missing, damaged, unsafe, or no language model's.
        ConfigurationError: overrides of settings that the checkpoint does not have, or that make
            another model.
        DataError: no such folder, or another dictionary than the model's.
        UnsupportedError: a language model that cannot be evaluated token by token, or built here.
    """
    checkpoint = load_checkpoint(path, verify)
    names = set(checkpoint["model"])
    if not any(name.startswith("decoder.") for name in names) or any(
        name.startswith("encoder.") for name in names
    ):
        found = "a model with an encoder"
        if not any(name.startswith("encoder.") for name in names):
            found = "a model without a decoder"
        raise CheckpointError(
            f"a language model, which is a decoder alone, in {path}",
            found,
            "Give a checkpoint of --task language_modeling or stateful_language_modeling; "
            "translation models are scored by fairseq-generate --score-reference.",
        )
    check_overrides(checkpoint, overrides)
    words = Path(data) / "dict.txt"
    if not os.path.isfile(words):
        raise MissingDataError(
            f"the dictionary {words}",
            "no such file",
            "Give the folder that fairseq-preprocess --only-source wrote to --destdir.",
        )
    settings = {**checkpoint_settings(checkpoint, "task"), **overrides}
    for name, flag in (
        ("add_bos_token", "--add-bos-token"),
        ("self_target", "--self-target"),
        ("past_target", "--past-target"),
    ):
        if settings.get(name):
            raise UnsupportedError(
                "a language model of the next token, whose text starts with the end of a sentence",
                f"one trained with {flag}",
                "Evaluate it with fairseq-eval-lm.",
            )
    model_settings = checkpoint_settings(checkpoint, "model")
    arch = str(model_settings.get("_name") or model_settings.get("arch"))
    remark = _remark(settings, words)
    del checkpoint  # fairseq reads it again
    model, task = build_model(path, data, overrides)
    if not isinstance(model, FairseqLanguageModel):
        raise CheckpointError(
            f"a language model in {path}",
            f"a {type(model).__name__}",
            "Give a checkpoint of --task language_modeling or stateful_language_modeling.",
        )
    dictionary, target_dictionary = task.source_dictionary, task.target_dictionary
    if len(target_dictionary) != len(dictionary):
        raise UnsupportedError(
            "one dictionary for input and output",
            f"{len(dictionary)} and {len(target_dictionary)} words (--output-dictionary-size)",
            "Evaluate it with fairseq-eval-lm.",
        )
    return LanguageModel(
        model.float().eval(),
        dictionary,
        bool(getattr(model, "stateful", False)),
        arch,
        settings,
        sha256(path),
        sha256(words),
        remark,
    )


def build_model(path: Any, data: Any, overrides: Mapping[str, Any]) -> Any:
    """The model of a checkpoint, of any kind, and its task, as fairseq builds them.

    Args:
        path: of the checkpoint.
        data: folder of binarised data.
        overrides: settings of the checkpoint that are changed.

    Raises:
        DataError: parameters that do not fit the dictionary of the data.
        UnsupportedError: fairseq cannot build the model.
    """
    try:
        models, _, task = checkpoint_utils.load_model_ensemble_and_task(
            [str(path)], arg_overrides={**overrides, "data": str(data)}
        )
    except SpectralFairseqError:
        raise  # by the models and tasks of this package; it says what to correct
    except (
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        text = str(error)
        if "size mismatch" in text or "Missing key" in text or "Unexpected key" in text:
            lines = [line.strip() for line in text.splitlines()[1:]]
            remedy = "Use the dictionary of the training"
            if overrides:
                remedy += ", and override only what leaves the parameters as they are"
            raise DataError(
                f"parameters in {path} that fit the dictionary in {data}",
                (lines or [text])[0].rstrip("."),
                f"{remedy}.",
            ) from error
        raise UnsupportedError(
            f"a model in {path} that fairseq can build with the data in {data}",
            f"{type(error).__name__}: {text.splitlines()[0] if text else ''}",
            "Use the data of its training; a model of another plugin cannot be run here.",
        ) from error
    return models[0], task


def _remark(settings: Mapping[str, Any], words: Path) -> Optional[str]:
    recorded = str(settings.get("data") or "").split(":")[0]
    trained = Path(recorded) / "dict.txt"
    if not recorded or not os.path.isfile(trained) or sha256(trained) == sha256(words):
        return None
    return (
        f"{words} differs from {trained}, with which the model was trained; if the order of the "
        "words differs, the figures mean nothing"
    )
