"""Build the models of checkpoints without their data, and compare the logits of two."""

from __future__ import annotations

import dataclasses
import warnings
from types import SimpleNamespace
from typing import Any, Dict, Mapping

import torch
from fairseq import models
from fairseq.data import Dictionary
from omegaconf import OmegaConf
from torch import Tensor

from spectral_fairseq.compat.checkpoints import EMBEDDING_FILES
from spectral_fairseq.errors import CheckpointError, SpectralFairseqError, UnsupportedError
from spectral_fairseq.plugin.tasks.training_counts import building_for

TOLERANCE = 1e-4
"""Logits count as equal up to this difference, relative to the largest logit."""


@dataclasses.dataclass(frozen=True)
class LogitCheck:
    """Logits of the original and the exported model on the same random input, float32.

    Args:
        max_difference: the largest absolute difference.
        max_logit: the largest absolute logit of the original.
    """

    max_difference: float
    max_logit: float

    @property
    def equal(self) -> bool:
        """Whether the difference is within :data:`TOLERANCE`; never for NaN."""
        return self.max_difference <= TOLERANCE * self.max_logit


def compare_logits(
    original: Mapping[str, Any], exported: Mapping[str, Any], seed: int = 1
) -> LogitCheck:
    """Run both checkpoints in evaluation mode on one padded batch of random tokens.

    Args:
        original: a checkpoint.
        exported: another of the same vocabulary, its tables plain.
        seed: of the random tokens.
    """
    task = task_like(exported["model"])
    factored, plain = build_model(original, task), build_model(exported, task)
    batch = random_batch(task, factored, torch.Generator().manual_seed(seed))
    with torch.no_grad(), warnings.catch_warnings():
        # fairseq's decoder passes masks of two types; users can do nothing about it.
        warnings.filterwarnings("ignore", "Support for mismatched key_padding_mask", UserWarning)
        expected, found = factored(**batch)[0].float(), plain(**batch)[0].float()
    return LogitCheck((expected - found).abs().max().item(), expected.abs().max().item())


def task_like(model: Mapping[str, Tensor]) -> Any:
    """A stand-in for a task that suffices to build a model: dictionaries of the right sizes.

    Args:
        model: name -> tensor, with plain tables.

    Raises:
        CheckpointError: a table is missing, or is none.
    """
    target_in = _rows(model, "decoder.embed_tokens.weight")
    output = model.get("decoder.output_projection.weight")
    target = target_in if output is None else _rows(model, "decoder.output_projection.weight")
    encoder = model.get("encoder.embed_tokens.weight")
    source = target_in if encoder is None else _rows(model, "encoder.embed_tokens.weight")
    dictionaries = {size: _dictionary(size) for size in (source, target)}
    return SimpleNamespace(
        source_dictionary=dictionaries[source], target_dictionary=dictionaries[target]
    )


def _rows(model: Mapping[str, Tensor], name: str) -> int:
    table = model.get(name)
    if table is None or table.dim() != 2 or len(table) < Dictionary().nspecial:
        raise CheckpointError(
            f"a table {name} with a row for each word",
            "none" if table is None else f"one of shape {tuple(table.shape)}",
            "Give a checkpoint that fairseq saved in training.",
        )
    return len(table)


def _dictionary(size: int) -> Dictionary:
    dictionary = Dictionary()
    while len(dictionary) < size:
        # A count above 1, since weight-norm tables start from log counts.
        dictionary.add_symbol(str(len(dictionary)), n=2)
    return dictionary


def build_model(checkpoint: Mapping[str, Any], task: Any) -> Any:
    """The model of a checkpoint with its weights, in float32 and evaluation mode.

    Args:
        checkpoint: with ``cfg.model`` as a mapping; files of word vectors in it are not read.
        task: as :func:`task_like` makes it.

    Raises:
        CheckpointError: settings from which no model can be built.
        UnsupportedError: the tensors are not those of the model.
    """
    # The model's configuration interpolates values of the other two.
    nodes = {name: checkpoint["cfg"].get(name) for name in ("model", "task", "common")}
    cfg = {name: dict(node) for name, node in nodes.items() if isinstance(node, dict)}
    for name in EMBEDDING_FILES:
        if cfg["model"].get(name):
            cfg["model"][name] = None
    try:
        with torch.random.fork_rng(devices=[]), building_for(task, from_checkpoint=True):
            model = models.build_model(OmegaConf.create(cfg).model, task)
    except SpectralFairseqError:
        raise
    except Exception as error:  # a file's settings may be anything, and fairseq checks few of them
        raise CheckpointError(
            "settings from which fairseq can build the checkpoint's model",
            f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            "Give a checkpoint that fairseq saved in training.",
        ) from error
    try:
        model.load_state_dict(dict(checkpoint["model"]), strict=True)
    except RuntimeError as error:
        raise UnsupportedError(
            f"tensors that fit {type(model).__name__}",
            str(error).replace("\n", " "),
            "The checkpoint is of another version, or the model has no plain equivalent.",
        ) from error
    return model.float().eval()


def random_batch(
    task: Any, model: Any, generator: torch.Generator, pad_left: bool = True
) -> Dict[str, Tensor]:
    """Three sequences of random words and different lengths, as arguments of the model.

    Args:
        task: as :func:`task_like` makes it.
        model: for which the batch is.
        generator: of the words.
        pad_left: whether the source is padded on the left, as in fairseq's translation, rather
            than on the right.
    """

    def tokens(dictionary: Dictionary, length: int, pad_left: bool) -> Tensor:
        rows = torch.randint(dictionary.nspecial, len(dictionary), (3, length), generator=generator)
        for row, padding in enumerate((0, length // 3, length // 2)):
            where = slice(0, padding) if pad_left else slice(length - padding, length)
            rows[row, where] = dictionary.pad()
        return rows  # [3, length]

    limits = model.max_positions()
    source_limit, target_limit = limits if isinstance(limits, tuple) else (limits, limits)
    target = tokens(task.target_dictionary, min(11, target_limit), pad_left=False)
    if not hasattr(model, "encoder"):
        return {"src_tokens": tokens(task.source_dictionary, min(11, source_limit), False)}
    source = tokens(task.source_dictionary, min(13, source_limit), pad_left)
    return {
        "src_tokens": source,
        "src_lengths": source.ne(task.source_dictionary.pad()).sum(1),
        "prev_output_tokens": target,
    }
