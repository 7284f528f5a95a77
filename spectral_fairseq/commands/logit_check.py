"""Build the models of checkpoints without their data, and compare the logits of two."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from argparse import Namespace
from types import SimpleNamespace
from typing import Any, Dict, Iterator, Mapping

import torch
from fairseq import models
from fairseq.data import Dictionary
from omegaconf import OmegaConf
from torch import Tensor

from spectral_fairseq.checkpoints.settings import by_name
from spectral_fairseq.compat.embedding_file import EMBEDDING_FILES
from spectral_fairseq.errors import (
    CheckpointError,
    NoEquivalentError,
    NotFairseqError,
    SpectralFairseqError,
    first_line,
)
from spectral_fairseq.plugin.counts import building_for

# Logits are equal up to this difference, over the largest of them.
TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class LogitCheck:
    """Logits of the original and the exported model on the same random input, float32.

    Args:
        max_difference: the largest absolute difference.
        max_logit: the largest absolute logit of the original.
    """

    max_difference: float
    max_logit: float

    @classmethod
    def of(cls, expected: Tensor, found: Tensor) -> LogitCheck:
        """That of the logits of both models, of one shape."""
        return cls((expected - found).abs().max().item(), expected.abs().max().item())

    @property
    def equal(self) -> bool:
        """Whether the difference is within :data:`TOLERANCE`; never for NaN."""
        return self.max_difference <= TOLERANCE * self.max_logit

    def refuse_unequal(self) -> LogitCheck:
        """This check, of logits that are equal.

        Raises:
            CheckpointError: they are not.
        """
        if self.equal:
            return self
        raise CheckpointError(
            f"logits equal within {TOLERANCE:g} of the largest, {self.max_logit:.3g}",
            f"a difference of {self.max_difference:.3g}",
            "Nothing was written. Look for NaN or infinite values in the checkpoint, or report a "
            "bug.",
        )


def compare_logits(original: Mapping[str, Any], exported: Mapping[str, Any]) -> LogitCheck:
    """Run both checkpoints in evaluation mode on one padded batch of random tokens.

    Raises:
        CheckpointError: their logits differ.
    """
    task = task_like(exported["model"])
    factored, plain = build_model(original, task), build_model(exported, task)
    batch = random_batch(task, factored)
    with for_logits():
        check = LogitCheck.of(factored(**batch)[0].float(), plain(**batch)[0].float())
    return check.refuse_unequal()


@contextlib.contextmanager
def for_logits() -> Iterator[None]:
    """Within this context models are run without gradients, and without a warning."""
    with torch.no_grad(), warnings.catch_warnings():
        # fairseq's decoder passes masks of two types; users can do nothing about it.
        warnings.filterwarnings("ignore", "Support for mismatched key_padding_mask", UserWarning)
        yield


def task_like(model: Mapping[str, Tensor]) -> Any:
    """A stand-in for a task that suffices to build a model: dictionaries of the right sizes."""
    words = _rows(model, "decoder.embed_tokens.weight")
    others = ("encoder.embed_tokens.weight", "decoder.output_projection.weight")
    source, target = (_rows(model, name) if name in model else words for name in others)
    dictionaries = {size: _dictionary(size) for size in (source, target)}
    return SimpleNamespace(
        source_dictionary=dictionaries[source], target_dictionary=dictionaries[target]
    )


def _rows(model: Mapping[str, Tensor], name: str) -> int:
    table = model.get(name)
    if table is None or table.dim() != 2 or len(table) < Dictionary().nspecial:
        found = "none" if table is None else f"one of shape {tuple(table.shape)}"
        raise NotFairseqError(f"a table {name} with a row for each word", found)
    return len(table)


def _dictionary(size: int) -> Dictionary:
    dictionary = Dictionary()
    while len(dictionary) < size:
        # A count above 1, since weight-norm tables start from log counts.
        dictionary.add_symbol(str(len(dictionary)), n=2)
    return dictionary


def build_model(checkpoint: Mapping[str, Any], task: Any) -> Any:
    """The model of a checkpoint with its weights, in float32 and evaluation mode.

    Files of word vectors that its settings name are not read.
    """
    # The model's configuration interpolates values of the other two.
    nodes = {name: checkpoint["cfg"].get(name) for name in ("model", "task", "common")}
    cfg = {
        name: dict(by_name(node))
        for name, node in nodes.items()
        if isinstance(node, (dict, Namespace))  # of fairseq's own archs it is a namespace
    }
    for name in EMBEDDING_FILES:
        if cfg["model"].get(name):
            cfg["model"][name] = None
    try:
        with torch.random.fork_rng(devices=[]), building_for(task, from_checkpoint=True):
            model = models.build_model(OmegaConf.create(cfg).model, task)
    except SpectralFairseqError:
        raise
    except Exception as error:  # a file's settings may be anything, and fairseq checks few of them
        wanted = "settings from which fairseq can build the checkpoint's model"
        raise NotFairseqError(wanted, first_line(error)) from error
    try:
        model.load_state_dict(dict(checkpoint["model"]), strict=True)
    except RuntimeError as error:
        wanted = f"tensors that fit {type(model).__name__}"
        raise NoEquivalentError(wanted, str(error).replace("\n", " ")) from error
    return model.float().eval()


def random_batch(task: Any, model: Any, pad_left: bool = True) -> Dict[str, Tensor]:
    """Three sequences of random words and different lengths, as arguments of the model."""
    generator = torch.Generator().manual_seed(1)

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
