"""The flags of ``--task stateful_language_modeling``, and their checks."""

# No "from __future__ import annotations" here: fairseq and omegaconf read the field types.
import argparse
from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.data.indexed_dataset import get_available_dataset_impl
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import II

from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.plugin.tasks.segment_lengths import SHORTEST


@dataclass
class StatefulLanguageModelingConfig(FairseqDataclass):
    """Flags of the task; the number of streams is ``--batch-size``."""

    data: Optional[str] = field(
        default=None,
        metadata={
            "help": "folder written by fairseq-preprocess --only-source; several, separated by "
            "':', are gone through one an epoch, and validated on the first"
        },
    )
    tokens_per_sample: int = field(
        default=70, metadata={"help": "L, tokens of a segment: the reach of back-propagation"}
    )
    variable_bptt: bool = field(
        default=False,
        metadata={
            "help": "draw the length of every training segment: normal around L with deviation 5, "
            "at least 5, and L/2 in place of L with probability 0.05; the learning rate of the "
            "update is multiplied by length/L"
        },
    )
    # fairseq's language models read these two from their task. Without them the configuration of
    # such a model would fail to resolve, before the task can say that it is not stateful.
    add_bos_token: bool = field(default=False, metadata={"help": argparse.SUPPRESS})
    max_target_positions: Optional[int] = field(default=None, metadata={"help": argparse.SUPPRESS})
    update_freq: Any = II("optimization.update_freq")
    train_subset: str = II("dataset.train_subset")
    dataset_impl: Optional[ChoiceEnum(get_available_dataset_impl())] = II(  # type: ignore
        "dataset.dataset_impl"
    )


def check_options(options: Any) -> None:
    """Refuse options with which nothing can be trained.

    Args:
        options: as in :class:`StatefulLanguageModelingConfig`.

    Raises:
        ConfigurationError: segments that are too short, or no data folder.
        UnsupportedError: flags of fairseq's task that have no meaning for streams.
    """
    shortest = 2 * SHORTEST if options.variable_bptt else 1
    if options.tokens_per_sample < shortest:
        why = f" with --variable-bptt, whose segments have at least {SHORTEST}"
        raise ConfigurationError(
            f"--tokens-per-sample of at least {shortest}{why if shortest > 1 else ''}",
            str(options.tokens_per_sample),
            "Raise it; 70 is usual.",
        )
    if options.add_bos_token or options.max_target_positions is not None:
        raise UnsupportedError(
            "streams of whole sentences, each ending in </s>",
            "--add-bos-token or --max-target-positions",
            "Leave the flag out, or use --task language_modeling.",
        )
    if not options.data:
        raise ConfigurationError(
            "a data folder", "none", "Name the folder that fairseq-preprocess wrote."
        )


def update_freq_in(options: Any, epoch: int) -> int:
    """The ``--update-freq`` of an epoch, counted from 1: micro-batches of one update.

    Raises:
        ConfigurationError: it is below 1.
    """
    frequencies = options.update_freq
    found = int(frequencies[min(epoch, len(frequencies)) - 1])
    if found < 1:
        raise ConfigurationError("--update-freq of at least 1", str(found), "Raise it; 1 is usual.")
    return found
