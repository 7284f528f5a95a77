"""``--task stateful_language_modeling``: a language model that remembers across batches.

The corpus is cut into parallel streams, and each of them into segments for back-propagation
through time. Every segment starts from the state in which the one before it ended, in training
as in validation.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any, Dict, Iterator, List, Optional, Set

from fairseq import utils
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask

from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.lm.awd_lstm import Carry
from spectral_fairseq.plugin.tasks.corpus import Corpus, sentences_in
from spectral_fairseq.plugin.tasks.scaled_rate import scaled_rate
from spectral_fairseq.plugin.tasks.segment_lengths import fixed_lengths
from spectral_fairseq.plugin.tasks.slot_carries import SlotCarries
from spectral_fairseq.plugin.tasks.stateful_options import (
    StatefulLanguageModelingConfig,
    check_options,
    update_freq_in,
)
from spectral_fairseq.plugin.tasks.stream_batches import (
    checked_batch_size,
    streams_to_evaluate,
    training_lengths,
)
from spectral_fairseq.plugin.tasks.stream_iterator import StreamIterator
from spectral_fairseq.plugin.tasks.streams import Streams

logger = logging.getLogger(__name__)


@register_task("stateful_language_modeling", dataclass=StatefulLanguageModelingConfig)
class StatefulLanguageModelingTask(LanguageModelingTask):
    """Language modelling over contiguous streams; generation is inherited from fairseq's task.

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
    def setup_task(cls, args: Any, **_: Any) -> StatefulLanguageModelingTask:
        """Check the options and load the dictionary.

        Raises:
            ConfigurationError: options with which nothing can be trained.
            UnsupportedError: flags of fairseq's task that have no meaning for streams.
        """
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
        """Load a split into memory.

        Args:
            split: such as ``train`` or ``valid``.
            epoch: chooses among several data folders.
            combine: go on with ``train1``, ``train2`` and so on.

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
            batch_size = streams_to_evaluate(asked, tokens, workers)
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
        if training:
            streams.cut(training_lengths(streams.length, self.args, others.get("seed", 1), epoch))
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
        """Train on one micro-batch, from the state in which its streams' last one ended.

        Args:
            sample: item of :class:`Streams`.
            model: what is trained.
            criterion: the loss.
            optimizer: of fairseq.
            update_num: number of updates before.
            ignore_grad: whether the sample only stands in for one that this worker lacks.
            kwargs: other arguments of fairseq.

        Returns:
            Loss, sample size and logging output.
        """
        if ignore_grad or self._training is None:
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
        """Evaluate one micro-batch, with states apart from those of training.

        Returns:
            Loss, sample size and logging output.
        """
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
            raise UnsupportedError(
                "sentences to continue, for fairseq-generate",
                "pieces of streams, which --task stateful_language_modeling makes of a split",
                "Give --task language_modeling --sample-break-mode eos, which takes the same "
                "checkpoints; fairseq-interactive works with either task.",
            )
        return super().inference_step(generator, models, sample, *more, **kwargs)

    def eval_lm_dataloader(self, *_: Any, **__: Any) -> Any:
        """Refuse fairseq-eval-lm, whose scorer keeps no state.

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
