"""``--task stateful_language_modeling``: a language model that remembers across batches.

The corpus is cut into parallel streams, and each of them into segments for back-propagation
through time. Every segment starts from the state in which the one before it ended, in training
as in validation.
"""

# No "from __future__ import annotations" here: fairseq and omegaconf read the field types.
import argparse
import contextlib
import logging
import os
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Set

import numpy as np
from fairseq import utils
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import get_available_dataset_impl
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask
from omegaconf import II

from spectral_fairseq import refusals
from spectral_fairseq.errors import ConfigurationError, check_range
from spectral_fairseq.lm.carry import Carry
from spectral_fairseq.options import option
from spectral_fairseq.plugin.corpus import Corpus, sentences_in
from spectral_fairseq.plugin.segment_lengths import SHORTEST, fixed_lengths, sampled_lengths
from spectral_fairseq.plugin.stream_iterator import SlotCarries, StreamIterator
from spectral_fairseq.plugin.streams import Streams

logger = logging.getLogger(__name__)


@dataclass
class StatefulLanguageModelingConfig(FairseqDataclass):
    """Flags of the task; the number of streams is ``--batch-size``."""

    data: Optional[str] = option(
        None,
        "folder written by fairseq-preprocess --only-source; several, separated by "
        "':', are gone through one an epoch, and validated on the first",
    )
    tokens_per_sample: int = option(70, "L, tokens of a segment: the reach of back-propagation")
    variable_bptt: bool = option(
        False,
        "draw the length of every training segment: normal around L with deviation 5, "
        "at least 5, and L/2 in place of L with probability 0.05; the learning rate of the "
        "update is multiplied by length/L",
    )
    # fairseq's language models read these two from their task. Without them the configuration of
    # such a model would fail to resolve, before the task can say that it is not stateful.
    add_bos_token: bool = option(False, argparse.SUPPRESS)
    max_target_positions: Optional[int] = option(None, argparse.SUPPRESS)
    update_freq: Any = II("optimization.update_freq")
    train_subset: str = II("dataset.train_subset")
    dataset_impl: Optional[ChoiceEnum(get_available_dataset_impl())] = II(  # type: ignore
        "dataset.dataset_impl"
    )


def check_options(options: Any) -> None:
    """Refuse options with which nothing can be trained.

    Raises:
        ConfigurationError: segments that are too short, or no data folder.
        UnsupportedError: flags of fairseq's task that have no meaning for streams.
    """
    shortest = 2 * SHORTEST if options.variable_bptt else 1
    what = "--tokens-per-sample with --variable-bptt" if shortest > 1 else "--tokens-per-sample"
    check_range(what, options.tokens_per_sample, at_least=shortest, whole=True)
    refusals.STREAMS.check(argparse.Namespace(task=options))
    if not options.data:
        remedy = "Name the folder that fairseq-preprocess wrote."
        raise ConfigurationError("a data folder", "none", remedy)


def update_freq_in(options: Any, epoch: int) -> int:
    """The ``--update-freq`` of an epoch, counted from 1: micro-batches of one update.

    Raises:
        ConfigurationError: it is below 1.
    """
    frequencies = options.update_freq
    frequency = int(frequencies[min(epoch, len(frequencies)) - 1])
    check_range("--update-freq", frequency, at_least=1, whole=True)
    return frequency


@contextlib.contextmanager
def scaled_rate(optimizer: Any, factor: float) -> Iterator[None]:
    """Multiply all learning rates, and restore them afterwards, whatever happens."""
    groups = list(optimizer.param_groups)
    rates = [group["lr"] for group in groups]
    for group, rate in zip(groups, rates):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(groups, rates):
            group["lr"] = rate


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
    what, batch_size = "--batch-size, the number of streams in parallel,", batch_size or 0
    remedy = "Add --batch-size (and --batch-size-valid); --max-tokens does not stand for it."
    check_range(what, batch_size, at_least=1, whole=True, remedy=remedy)
    of, least = "" if training else "-valid", batch_size * length
    remedy = f"Leave it out, or lower --batch-size{of} or --tokens-per-sample."
    if max_tokens is not None:
        check_range(f"--max-tokens{of}", max_tokens, at_least=least, whole=True, remedy=remedy)
    limits = [max_positions] if isinstance(max_positions, (int, float)) else max_positions or ()
    lowest = min((limit for limit in limits if limit is not None), default=length)
    remedy = "Lower it, or raise the model's limit."
    check_range("--tokens-per-sample", length, at_most=lowest, whole=True, remedy=remedy)
    return batch_size


@register_task("stateful_language_modeling", dataclass=StatefulLanguageModelingConfig)
class StatefulLanguageModelingTask(LanguageModelingTask):
    """Language modelling over contiguous streams; generation is inherited from fairseq's task.

    Args:
        args: options, as in :class:`StatefulLanguageModelingConfig`.
        dictionary: the words of input and output.
    """

    def __init__(self, args: Any, dictionary: Dictionary) -> None:
        super().__init__(args, dictionary)
        self._asked_for_training = False
        self._training: Optional[StreamIterator] = None
        self._validation = SlotCarries()
        self._rate_factor = 1.0
        self._said: Set[str] = set()

    @classmethod
    def setup_task(cls, args: Any, **_: Any) -> "StatefulLanguageModelingTask":
        """Check the options and load the dictionary."""
        check_options(args)
        dictionary = Dictionary.load(os.path.join(utils.split_paths(args.data)[0], "dict.txt"))
        logger.info(f"dictionary: {len(dictionary)} types")
        return cls(args, dictionary)

    def build_model(self, args: Any, from_checkpoint: bool = False) -> Any:
        """Build a model, and refuse one without a state.

        Raises:
            ConfigurationError: the model has no state that could be carried.
        """
        name = getattr(args, "_name", None) or getattr(args, "arch", None)
        # Checked before the model is built, because building may need options that only fairseq's
        # own task has.
        _refuse_stateless(ARCH_MODEL_REGISTRY.get(name) or MODEL_REGISTRY.get(name), name)
        return super().build_model(args, from_checkpoint)

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **_: Any) -> None:
        """Load a split into memory; the epoch, from 1, chooses among several data folders.

        Raises:
            MissingDataError: no such split, or, in training, not in every data folder.
        """
        paths = utils.split_paths(self.args.data)
        chosen = paths[(epoch - 1) % len(paths)]
        kind = self.args.dataset_impl
        if self._asked_for_training:
            for other in set(paths) - {chosen}:  # a missing split is reported now, not epochs later
                sentences_in(other, split, self.dictionary, kind, combine)
        sentences = sentences_in(chosen, split, self.dictionary, kind, combine)
        self.datasets[split] = Corpus(sentences, self.dictionary.eos())

    @contextlib.contextmanager
    def for_training(self) -> Iterator[None]:
        """Within this context batches are for training; otherwise they are for evaluation."""
        self._asked_for_training = True
        try:
            yield
        finally:
            self._asked_for_training = False

    def get_batch_iterator(
        self,
        dataset: Any,
        max_tokens: Optional[int] = None,
        max_sentences: Optional[int] = None,
        max_positions: Any = None,
        **others: Any,
    ) -> Any:
        """An epoch's micro-batches for one worker.

        They are a function of the arguments alone, so an epoch in which training resumes has the
        segments that it would have had. All workers get equally many, in order: what fairseq
        offers for shuffling, filtering and rounding batches has no meaning here.

        Args:
            dataset: the split, as :meth:`load_dataset` left it. Anything else, such as the lines
                of fairseq-interactive, is batched by fairseq's own task.
            max_tokens: upper bound for a micro-batch of full segments, if any.
            max_sentences: streams of a micro-batch.
            max_positions: longest segment that the model reads, if limited.
            others: ``seed``, ``epoch``, ``num_shards``, ``shard_id``, ``num_workers`` and
                ``data_buffer_size`` as in fairseq.

        Raises:
            ConfigurationError: no batch size, or one beyond ``max_tokens``.
            DataError: fewer tokens than streams.
        """
        if not isinstance(dataset, Corpus):
            return super().get_batch_iterator(
                dataset, max_tokens, max_sentences, max_positions, **others
            )
        training, length = self._asked_for_training, self.args.tokens_per_sample
        epoch, workers = others.get("epoch", 1), others.get("num_shards", 1)
        batch_size = checked_batch_size(max_sentences, length, max_tokens, max_positions, training)
        if not training:
            asked, tokens = batch_size, len(dataset)
            # At least one token in each, or one stream.
            batch_size = asked if tokens >= asked * workers else max(1, tokens // workers)
            if batch_size < asked:
                self._say_once(
                    f"evaluating {tokens} tokens in {batch_size} streams instead of {asked}"
                )
        streams = Streams(
            dataset,
            batch_size=batch_size,
            slots=update_freq_in(self.args, epoch) if training else 1,
            workers=workers,
            pad=self.dictionary.pad(),
            trim=training,
        )
        if training and self.args.variable_bptt:
            generator = np.random.default_rng([others.get("seed", 1), epoch])
            streams.cut(sampled_lengths(streams.length, length, generator))
        else:
            streams.cut(fixed_lengths(streams.length, length))
        iterator = StreamIterator(
            streams,
            others.get("shard_id", 0),
            epoch,
            others.get("num_workers", 0),
            others.get("data_buffer_size", 0),
        )
        if training:
            self._training = iterator
            self._say_once(
                f"training on {streams.groups * batch_size} streams of {streams.length:,} tokens; "
                f"{streams.trimmed} of {len(dataset):,} tokens are left out at the end, because "
                "all streams have equally many"
            )
        return iterator

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.info(message)

    def begin_epoch(self, epoch: int, model: Any) -> None:
        """Move restored states to the model's device; a new epoch has none."""
        super().begin_epoch(epoch, model)
        if self._training is None:
            return
        parameter = next(model.parameters())
        if self._training.precision not in (None, str(parameter.dtype)):
            logger.warning(
                "the streams start afresh, without carried state: it was saved in "
                f"{self._training.precision}, and the model is in {parameter.dtype}"
            )
            self._training.carries.reset()
        self._training.carries.to(parameter.device)

    def begin_valid_epoch(self, epoch: int, model: Any) -> None:
        """Start validation at the beginning of its streams."""
        super().begin_valid_epoch(epoch, model)
        self._validation.reset()

    def train_step(
        self,
        sample: Dict[str, Any],
        model: Any,
        criterion: Any,
        optimizer: Any,
        update_num: int,
        ignore_grad: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Train on one micro-batch, from the state in which its streams' last one ended."""
        if ignore_grad or self._training is None:  # it stands in for one that this worker lacks
            carry = Carry()
        else:
            carry = self._training.carries.at(sample["slot"], sample["segment"])
        if self.args.variable_bptt:
            # All micro-batches and workers of an update have segments of the same length.
            self._rate_factor = sample["target"].size(1) / self.args.tokens_per_sample
        sample = _with_carry(sample, carry)
        return super().train_step(
            sample, model, criterion, optimizer, update_num, ignore_grad, **kwargs
        )

    def valid_step(self, sample: Dict[str, Any], model: Any, criterion: Any, **kwargs: Any) -> Any:
        """Evaluate one micro-batch, with states apart from those of training."""
        carry = self._validation.at(sample["slot"], sample["segment"])
        return super().valid_step(_with_carry(sample, carry), model, criterion, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, update_num: int) -> None:
        """Step with the learning rate that belongs to this update's segment length."""
        with scaled_rate(optimizer, self._rate_factor):
            super().optimizer_step(optimizer, model, update_num)

    def inference_step(
        self, generator: Any, models: Any, sample: Dict[str, Any], *more: Any, **kwargs: Any
    ) -> Any:
        """Continue sentences, as fairseq's task does, but not pieces of streams.

        Raises:
            UnsupportedError: a batch of a split of this task.
        """
        if "segment" in sample:
            raise refusals.GENERATE.error("pieces of streams, for fairseq-generate")
        return super().inference_step(generator, models, sample, *more, **kwargs)

    def eval_lm_dataloader(self, *_: Any, **__: Any) -> Any:
        """Refuse fairseq-eval-lm, whose scorer keeps no state.

        Raises:
            UnsupportedError: always.
        """
        raise refusals.EVAL_LM.error("fairseq-eval-lm")


def _with_carry(sample: Dict[str, Any], carry: Carry) -> Dict[str, Any]:
    return {**sample, "net_input": {**sample["net_input"], "carry": carry}}


def _refuse_stateless(model: Any, name: Optional[str]) -> None:
    if model is None or getattr(model, "stateful", False):
        return
    stateful: List[str] = sorted(
        arch for arch, kind in ARCH_MODEL_REGISTRY.items() if getattr(kind, "stateful", False)
    )
    raise ConfigurationError(
        "a model that carries its state from a segment to the next",
        f"--arch {name}",
        f"Choose one of {', '.join(stateful)}, or --task language_modeling.",
    )
