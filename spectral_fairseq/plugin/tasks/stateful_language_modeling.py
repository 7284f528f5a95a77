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
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Optional, Set

import numpy as np
from fairseq import utils
from fairseq.data import Dictionary, data_utils
from fairseq.data.indexed_dataset import get_available_dataset_impl
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask
from omegaconf import II

from spectral_fairseq.errors import ConfigurationError, MissingDataError, UnsupportedError
from spectral_fairseq.lm.carry import Carry
from spectral_fairseq.plugin.tasks.corpus import Corpus
from spectral_fairseq.plugin.tasks.scaled_rate import scaled_rate
from spectral_fairseq.plugin.tasks.segment_lengths import SHORTEST, fixed_lengths, sampled_lengths
from spectral_fairseq.plugin.tasks.slot_carries import SlotCarries
from spectral_fairseq.plugin.tasks.stream_iterator import StreamIterator
from spectral_fairseq.plugin.tasks.streams import Streams

logger = logging.getLogger(__name__)


@dataclass
class StatefulLanguageModelingConfig(FairseqDataclass):
    """Options of the task; the number of streams is ``--batch-size``."""

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
    # The host's language models read these two from their task. Without them the configuration
    # of such a model would fail to resolve, before the task can say that it is not stateful.
    add_bos_token: bool = field(default=False, metadata={"help": argparse.SUPPRESS})
    max_target_positions: Optional[int] = field(default=None, metadata={"help": argparse.SUPPRESS})
    update_freq: Any = II("optimization.update_freq")
    dataset_impl: Optional[ChoiceEnum(get_available_dataset_impl())] = II(  # type: ignore
        "dataset.dataset_impl"
    )


@register_task("stateful_language_modeling", dataclass=StatefulLanguageModelingConfig)
class StatefulLanguageModelingTask(LanguageModelingTask):
    """Language modelling over contiguous streams; generation is inherited from the host.

    Args:
        args: options, as in :class:`StatefulLanguageModelingConfig`.
        dictionary: of words, for input and output.
    """

    def __init__(self, args: Any, dictionary: Dictionary) -> None:
        super().__init__(args, dictionary)
        self._asked_for_training = False
        self._training: Optional[StreamIterator] = None
        self._validation = SlotCarries()
        self._rate_factor = 1.0
        self._said: Set[str] = set()

    @classmethod
    def setup_task(cls, args: Any, **kwargs: Any) -> "StatefulLanguageModelingTask":
        """Check the options and load the dictionary.

        Args:
            args: options, as in :class:`StatefulLanguageModelingConfig`.
            kwargs: not needed.

        Raises:
            ConfigurationError: a segment length with which nothing can be trained.
            UnsupportedError: flags of the host's task that have no meaning for streams.
        """
        shortest = 2 * SHORTEST if args.variable_bptt else 1
        if args.tokens_per_sample < shortest:
            why = " with --variable-bptt, whose segments have at least 5" if shortest > 1 else ""
            raise ConfigurationError(
                f"--tokens-per-sample of at least {shortest}{why}",
                str(args.tokens_per_sample),
                "Raise it; 70 is usual.",
            )
        if args.add_bos_token or args.max_target_positions is not None:
            raise UnsupportedError(
                "streams of whole sentences, each ending in </s>",
                "--add-bos-token or --max-target-positions",
                "Leave the flag out, or use --task language_modeling.",
            )
        if not args.data:
            raise ConfigurationError(
                "a data folder", "none", "Name the one that fairseq-preprocess wrote."
            )
        dictionary = Dictionary.load(os.path.join(utils.split_paths(args.data)[0], "dict.txt"))
        logger.info(f"dictionary: {len(dictionary)} types")
        return cls(args, dictionary)

    def build_model(self, args: Any, from_checkpoint: bool = False) -> Any:
        """Build a model, and refuse one that carries no state.

        Args:
            args: the model's options.
            from_checkpoint: whether it is filled from a checkpoint.

        Raises:
            ConfigurationError: a model without a carry.
        """
        name = getattr(args, "_name", None) or getattr(args, "arch", None)
        # Before it is built: it may ask this task for options that only the host's task has.
        _refuse_stateless(ARCH_MODEL_REGISTRY.get(name) or MODEL_REGISTRY.get(name), name)
        return super().build_model(args, from_checkpoint)

    def load_dataset(
        self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any
    ) -> None:
        """Load a split into memory.

        Args:
            split: such as ``train`` or ``valid``.
            epoch: chooses among several data folders.
            combine: go on with ``train1``, ``train2`` and so on.
            kwargs: not needed.

        Raises:
            MissingDataError: no such split, or, in training, not in every data folder.
        """
        paths = utils.split_paths(self.args.data)
        chosen = paths[(epoch - 1) % len(paths)]
        if self._asked_for_training:
            for other in set(paths) - {chosen}:
                self._sentences(other, split, combine)  # now rather than epochs later
        sentences = self._sentences(chosen, split, combine)
        self.datasets[split] = Corpus(sentences, self.dictionary.eos())

    def _sentences(self, folder: str, split: str, combine: bool) -> Any:
        prefix = os.path.join(folder, split)
        sentences = data_utils.load_indexed_dataset(
            prefix, self.dictionary, self.args.dataset_impl, combine=combine
        )
        if sentences is None:
            raise MissingDataError(
                f"the split '{split}' in the data folder {folder}",
                f"no {prefix}.idx",
                "Give the name of a split that exists (--train-subset, --valid-subset), or "
                "prepare it with fairseq-preprocess --only-source.",
            )
        return sentences

    @contextlib.contextmanager
    def for_training(self) -> Iterator[None]:
        """Within this context batches are for training; else they are to be evaluated."""
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
        seed: int = 1,
        num_shards: int = 1,
        shard_id: int = 0,
        num_workers: int = 0,
        epoch: int = 1,
        data_buffer_size: int = 0,
        **others: Any,
    ) -> Any:
        """An epoch's micro-batches for one worker.

        A function of its arguments alone, so that an epoch in which training resumes has the
        segments that it would have had. All workers get equally many, in order: what the host
        offers for shuffling, filtering and rounding batches has no meaning here.

        Args:
            dataset: the split, as :meth:`load_dataset` left it; anything else, such as the lines
                of fairseq-interactive, goes the host's way.
            max_tokens: upper bound for a micro-batch of full segments, if any.
            max_sentences: streams of a micro-batch.
            max_positions: longest segment that the model reads, if limited.
            seed: for drawing lengths, together with ``epoch``.
            num_shards: number of workers.
            shard_id: number of this worker.
            num_workers: processes that load data.
            epoch: from 1.
            data_buffer_size: micro-batches to keep ready.
            others: for the host alone.

        Raises:
            ConfigurationError: no batch size, or one beyond ``max_tokens``.
            DataError: fewer tokens than streams.
        """
        if not isinstance(dataset, Corpus):
            return super().get_batch_iterator(
                dataset, max_tokens, max_sentences, max_positions, seed=seed,
                num_shards=num_shards, shard_id=shard_id, num_workers=num_workers, epoch=epoch,
                data_buffer_size=data_buffer_size, **others,
            )  # fmt: skip
        training = self._asked_for_training
        batch_size = self._batch_size(max_sentences, max_tokens, max_positions)
        if not training:
            batch_size = self._streams_to_evaluate(batch_size, len(dataset), num_shards)
        streams = Streams(
            dataset,
            batch_size=batch_size,
            slots=self._slots(epoch) if training else 1,
            workers=num_shards,
            pad=self.dictionary.pad(),
            trim=training,
        )
        length = self.args.tokens_per_sample
        if training and self.args.variable_bptt:
            generator = np.random.default_rng([seed, epoch])
            streams.cut(sampled_lengths(streams.length, length, generator))
        else:
            streams.cut(fixed_lengths(streams.length, length))
        iterator = StreamIterator(streams, shard_id, epoch, num_workers, data_buffer_size)
        if training:
            self._training = iterator
            self._say_once(
                f"training on {streams.groups * batch_size} streams of {streams.length:,} tokens; "
                f"{streams.trimmed} of {len(dataset):,} tokens are left out at the end, because "
                "all streams have equally many"
            )
        return iterator

    def _batch_size(
        self, streams: Optional[int], max_tokens: Optional[int], max_positions: Any
    ) -> int:
        length = self.args.tokens_per_sample
        if not streams:
            raise ConfigurationError(
                "--batch-size, the number of streams that are read in parallel",
                "none" if max_tokens is None else f"--max-tokens {max_tokens} alone",
                "Add --batch-size (and --batch-size-valid).",
            )
        if max_tokens is not None and streams * length > max_tokens:
            raise ConfigurationError(
                f"--max-tokens of at least --batch-size x --tokens-per-sample = "
                f"{streams} x {length}",
                str(max_tokens),
                "Leave --max-tokens out, or lower one of the two.",
            )
        limits = [max_positions] if isinstance(max_positions, (int, float)) else max_positions or ()
        if any(limit is not None and limit < length for limit in limits):
            raise ConfigurationError(
                f"--tokens-per-sample within the model's limit of {min(limits)}",
                str(length),
                "Lower --tokens-per-sample, or raise the model's limit.",
            )
        return streams

    def _slots(self, epoch: int) -> int:
        frequencies = self.args.update_freq
        return int(frequencies[min(epoch, len(frequencies)) - 1])

    def _streams_to_evaluate(self, batch_size: int, tokens: int, workers: int) -> int:
        if tokens >= batch_size * workers:
            return batch_size
        fewer = max(1, tokens // workers)
        self._say_once(f"evaluating {tokens} tokens in {fewer} streams instead of {batch_size}")
        return fewer

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.info(message)

    def begin_epoch(self, epoch: int, model: Any) -> None:
        """Bring restored states to the model's device; a new epoch has none.

        Args:
            epoch: from 1.
            model: what is trained.
        """
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
        """Validation starts at the beginning of its streams.

        Args:
            epoch: from 1.
            model: what is evaluated.
        """
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
        """Train on one micro-batch, from the state in which its streams' last one ended.

        Args:
            sample: item of :class:`Streams`.
            model: what is trained.
            criterion: the loss.
            optimizer: the host's.
            update_num: number of updates before.
            ignore_grad: whether the sample is but a stand-in.
            kwargs: what else the host gives.

        Returns:
            Loss, sample size and logging output.
        """
        if ignore_grad or self._training is None:
            carry = Carry()
        else:
            carry = self._training.carries.at(sample["slot"], sample["segment"])
        if self.args.variable_bptt:
            # The same for all micro-batches and workers of an update.
            self._rate_factor = sample["target"].size(1) / self.args.tokens_per_sample
        sample = _with_carry(sample, carry)
        return super().train_step(
            sample, model, criterion, optimizer, update_num, ignore_grad, **kwargs
        )

    def valid_step(self, sample: Dict[str, Any], model: Any, criterion: Any, **kwargs: Any) -> Any:
        """Evaluate one micro-batch, with states of its own.

        Args:
            sample: item of :class:`Streams`.
            model: what is evaluated.
            criterion: the loss.
            kwargs: what else the host gives.

        Returns:
            Loss, sample size and logging output.
        """
        carry = self._validation.at(sample["slot"], sample["segment"])
        return super().valid_step(_with_carry(sample, carry), model, criterion, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, update_num: int) -> None:
        """Step with the learning rate that belongs to this update's segment length.

        Args:
            optimizer: the host's, wrapped for half precision or not.
            model: what is trained.
            update_num: number of updates before.
        """
        with scaled_rate(optimizer, self._rate_factor):
            super().optimizer_step(optimizer, model, update_num)

    def inference_step(
        self, generator: Any, models: Any, sample: Dict[str, Any], *more: Any, **kwargs: Any
    ) -> Any:
        """Continue sentences, as the host's task does, but not pieces of streams.

        Args:
            generator: the host's.
            models: an ensemble.
            sample: a batch of sentences.
            more: what else the host gives.
            kwargs: likewise.

        Raises:
            UnsupportedError: a batch of a split of this task.
        """
        if "segment" in sample:
            raise UnsupportedError(
                "sentences to continue, for fairseq-generate",
                "pieces of streams, which --task stateful_language_modeling makes of a split",
                "Give --task language_modeling --sample-break-mode eos, which takes the same "
                "checkpoints; fairseq-interactive works with either task.",
            )
        return super().inference_step(generator, models, sample, *more, **kwargs)

    def eval_lm_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Not here: the host's scorer keeps no state.

        Args:
            args: not needed.
            kwargs: not needed.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "a task without carried state in fairseq-eval-lm",
            "--task stateful_language_modeling",
            "Leave --task out to score blocks of --tokens-per-sample tokens apart; for "
            "perplexity with carried state use spectral-fairseq evaluate-lm or fairseq-validate.",
        )


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
