"""From the flags of batches to streams: how many, how long, and cut into which segments."""

from __future__ import annotations

from typing import Any, List, Optional

import numpy as np

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.plugin.tasks.segment_lengths import fixed_lengths, sampled_lengths


def checked_batch_size(
    batch_size: Optional[int],
    length: int,
    max_tokens: Optional[int],
    max_positions: Any,
    training: bool,
) -> int:
    """The number of streams of a micro-batch.

    Args:
        batch_size: ``--batch-size``.
        length: ``--tokens-per-sample``.
        max_tokens: ``--max-tokens``, an upper bound for a micro-batch of full segments.
        max_positions: the longest segment that the model reads, one or several limits.
        training: whether the flags are those of training, and not of validation.

    Raises:
        ConfigurationError: no batch size, or segments that exceed a limit.
    """
    if not batch_size or batch_size < 1:
        alone = "none" if max_tokens is None else f"--max-tokens {max_tokens} alone"
        raise ConfigurationError(
            "--batch-size, the number of streams that are read in parallel, of at least 1",
            str(batch_size) if batch_size else alone,
            "Add --batch-size (and --batch-size-valid).",
        )
    if max_tokens is not None and batch_size * length > max_tokens:
        of = "" if training else "-valid"
        raise ConfigurationError(
            f"--max-tokens{of} of at least --batch-size{of} x --tokens-per-sample = "
            f"{batch_size} x {length}",
            str(max_tokens),
            f"Leave --max-tokens{of} out, or lower one of the two.",
        )
    limits = [max_positions] if isinstance(max_positions, (int, float)) else max_positions or ()
    lowest = min((limit for limit in limits if limit is not None), default=length)
    if lowest < length:
        raise ConfigurationError(
            f"--tokens-per-sample within the model's limit of {lowest}",
            str(length),
            "Lower --tokens-per-sample, or raise the model's limit.",
        )
    return batch_size


def streams_to_evaluate(batch_size: int, tokens: int, workers: int) -> int:
    """The number of streams of a micro-batch with at least one token in each, or one stream."""
    return batch_size if tokens >= batch_size * workers else max(1, tokens // workers)


def training_lengths(total: int, options: Any, seed: int, epoch: int) -> List[int]:
    """The segments of a training epoch, a function of seed and epoch alone.

    Args:
        total: tokens of a stream.
        options: the flags of the task.
        seed: ``--seed``.
        epoch: from 1.
    """
    if options.variable_bptt:
        generator = np.random.default_rng([seed, epoch])
        return sampled_lengths(total, options.tokens_per_sample, generator)
    return fixed_lengths(total, options.tokens_per_sample)
