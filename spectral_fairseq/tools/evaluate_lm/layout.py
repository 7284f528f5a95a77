"""How a model reads a split: as streams in segments if it has a state, else as blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.lm.evaluation import Reader, StreamReader
from spectral_fairseq.lm.tuning import DYNAMIC_SEGMENT
from spectral_fairseq.tools.evaluate_lm.options import Options
from spectral_fairseq.tools.language_models.block_reader import BlockReader
from spectral_fairseq.tools.language_models.loading import LanguageModel

DEFAULT_SEGMENT = 70


class Layout(NamedTuple):
    """Sizes of what is read at a time.

    Attributes:
        streams: B, read side by side; 1 for a model without a state.
        segment: T, tokens of each stream, or of a block.
        context: C, tokens of a block that repeat the end of the block before.
    """

    streams: int
    segment: int
    context: int

    def described(self, stateful: bool) -> Any:
        """The sizes under the names that signatures use."""
        if stateful:
            return {"streams": self.streams, "segment": self.segment}
        return {"block": self.segment, "context": self.context}


def choose_layout(loaded: LanguageModel, options: Options) -> Layout:
    """The sizes asked for, or else those of the training.

    Raises:
        ConfigurationError: sizes that mean nothing to this kind of model.
    """
    trained = int(loaded.settings.get("tokens_per_sample") or DEFAULT_SEGMENT)
    if not loaded.stateful:
        if options.streams != 1:
            raise ConfigurationError(
                "--streams 1 for a model without a state",
                str(options.streams),
                f"Leave it out: {loaded.arch} reads blocks that do not depend on each other.",
            )
        usual = min(trained, loaded.model.max_positions())
        return Layout(1, options.segment or usual, options.context_window)
    if options.context_window:
        raise ConfigurationError(
            "no --context-window for a model with a state",
            str(options.context_window),
            f"Leave it out: {loaded.arch} carries its state from each segment to the next.",
        )
    usual = DYNAMIC_SEGMENT if options.dynamic is not None else trained
    return Layout(options.streams, options.segment or usual, 0)


def reader_for(loaded: LanguageModel, layout: Layout, rows: int) -> Reader:
    """What cuts a corpus for this model.

    Args:
        loaded: the model.
        layout: the sizes.
        rows: blocks that are run together; unused for a model with a state.
    """
    model, padding, start = loaded.model, loaded.padding, loaded.start
    if loaded.stateful:
        return StreamReader(model, padding, start, layout.streams, layout.segment)
    return BlockReader(model, padding, start, layout.segment, layout.context, rows)
