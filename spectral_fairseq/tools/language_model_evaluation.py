"""Perplexity of a language model's checkpoint, alone, with a cache, or adapting to the text.

From options to one JSON-ready document, in which each figure has its signature. The mathematics is
in :mod:`spectral_fairseq.lm.evaluation` and its neighbours.
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch

from spectral_fairseq.analysis.results import finite
from spectral_fairseq.errors import ConfigurationError, DataError, UnsupportedError
from spectral_fairseq.functional.dynamic_update import DynamicRates
from spectral_fairseq.functional.progress_callback import ProgressCallback
from spectral_fairseq.lm.continuous_cache import ContinuousCache
from spectral_fairseq.lm.dynamic_evaluation import (
    DynamicEvaluation,
    GradientStatistics,
    adapted_parameters,
    check_rates,
    gradient_statistics,
)
from spectral_fairseq.lm.evaluation import (
    CacheGrid,
    Corpus,
    Reader,
    StreamReader,
    evaluate,
    perplexity,
)
from spectral_fairseq.lm.tuning import (
    CACHE_THETAS,
    CACHE_WEIGHTS,
    DYNAMIC_DECAYS,
    DYNAMIC_RATES,
    DYNAMIC_SEGMENT,
    GridSearch,
    check_dynamic_grid,
    search_cache,
    search_dynamic,
)
from spectral_fairseq.provenance import versions
from spectral_fairseq.tools.language_model_reader import (
    BlockReader,
    LanguageModel,
    load_language_model,
    open_corpus,
    parse_overrides,
)

SCHEMA = "spectral-fairseq/evaluate-lm/1"
VALIDATION, TRAINING = "valid", "train"
DEFAULT_SEGMENT = 70
# A batch of the published gradient statistics is 100 streams x 5 tokens, about one block.
STATISTICS_STREAMS, STATISTICS_BLOCKS = 100, 1

Begin = Callable[[str, int], ProgressCallback]
"""Called with the name of a stage and its number of tokens; gives what counts them."""


@dataclass
class CacheOptions:
    """Of the continuous cache; the defaults are those published for WikiText-2.

    Attributes:
        window: W.
        theta: of the exponent.
        weight: lambda.
    """

    window: int = 3785
    theta: float = 0.662
    weight: float = 0.1279


PUBLISHED = {
    "mean": DynamicRates(rate=5e-5, decay=0.002, epsilon=2e-5),
    "sum": DynamicRates(rate=0.002, decay=0.02, epsilon=0.001),
}
"""The defaults of dynamic evaluation's code for AWD-LSTM, of its present and its first version."""


@dataclass
class DynamicOptions:
    """Of dynamic evaluation; the defaults are those of its authors' code.

    Attributes:
        rate: eta; None is the published value in ``units``.
        decay: lambda, likewise.
        epsilon: added to the root mean square, likewise.
        units: ``mean`` for the paper's equations, ``sum`` for values published with sums
            (functional/dynamic_update.py, Note [Two units of the published values]).
        batches: of the training split, for its gradients; None for all.
        batch_size: streams of each; for a model without a state, blocks. None is the published
            100 streams, or one block.
    """

    rate: Optional[float] = None
    decay: Optional[float] = None
    epsilon: Optional[float] = None
    units: str = "mean"
    batches: Optional[int] = None
    batch_size: Optional[int] = None

    @property
    def rates(self) -> DynamicRates:
        """The three numbers, in ``units``."""
        given = (self.rate, self.decay, self.epsilon)
        return DynamicRates(
            *(usual if one is None else one for one, usual in zip(given, PUBLISHED[self.units]))
        )


@dataclass
class TuneOptions:
    """Of the grid search on the validation split.

    Attributes:
        tokens: first tokens of the split to use; None for all.
        cache_thetas: grid.
        cache_weights: grid.
        dynamic_rates: grid, in the units of :class:`DynamicOptions`; None is that of the authors'
            code, scaled by the segment.
        dynamic_decays: likewise.
    """

    tokens: Optional[int] = None
    cache_thetas: Sequence[float] = CACHE_THETAS
    cache_weights: Sequence[float] = CACHE_WEIGHTS
    dynamic_rates: Optional[Sequence[float]] = None
    dynamic_decays: Optional[Sequence[float]] = None


@dataclass
class Options:
    """What decides the figures; part of every signature.

    Attributes:
        subset: split to evaluate.
        streams: read side by side by a model with a state.
        segment: tokens at a time; None takes 5 for dynamic evaluation, else that of the training.
        context_window: tokens of a block that only repeat the one before, without a state.
        overrides: ``--model-overrides``, as text.
        cache: None for no cache.
        dynamic: None for a model that stays as it is.
        tune: None for the values given.
        cpu: leave a GPU alone.
    """

    subset: str = VALIDATION
    streams: int = 1
    segment: Optional[int] = None
    context_window: int = 0
    overrides: str = "{}"
    cache: Optional[CacheOptions] = None
    dynamic: Optional[DynamicOptions] = None
    tune: Optional[TuneOptions] = None
    cpu: bool = False

    def check(self) -> None:
        """Refuse impossible values before any work.

        Raises:
            ConfigurationError: an option outside its range, or --tune with nothing to tune.
        """
        for flag, value, least in (
            ("--streams", self.streams, 1),
            ("--segment", 1 if self.segment is None else self.segment, 1),
            ("--context-window", self.context_window, 0),
        ):
            _at_least(flag, value, least)
        parse_overrides(self.overrides)
        if self.cache is not None:
            ContinuousCache(self.cache.window)
            CacheGrid(self.cache.window, [self.cache.theta], [self.cache.weight]).check()
        dynamic, tune = self.dynamic, self.tune
        if dynamic is not None:
            check_rates(dynamic.rates)
            for flag, number in (
                ("--dynamic-batches", dynamic.batches),
                ("--dynamic-batch-size", dynamic.batch_size),
            ):
                _at_least(flag, 1 if number is None else number, 1)
        if tune is None:
            return
        if self.cache is None and dynamic is None:
            raise ConfigurationError(
                "--tune with --cache, --dynamic or both", "neither",
                "Add one of them: a plain model has nothing to tune.",
            )  # fmt: skip
        _at_least("--tune-tokens", 1 if tune.tokens is None else tune.tokens, 1)
        if self.cache is not None:
            CacheGrid(self.cache.window, tune.cache_thetas, tune.cache_weights).check()
        if dynamic is not None:
            _dynamic_grid(dynamic, tune, DYNAMIC_SEGMENT)


def _at_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigurationError(f"{flag} to be at least {least}", str(value), "Correct it.")


def _dynamic_grid(
    dynamic: DynamicOptions, tune: TuneOptions, segment: int
) -> Tuple[List[float], List[float]]:
    scale = segment / DYNAMIC_SEGMENT
    rates, decays = tune.dynamic_rates, tune.dynamic_decays
    if dynamic.units != "mean" and (rates is None or decays is None):
        raise ConfigurationError(
            "--tune-dynamic-rate and --tune-dynamic-decay beside --dynamic-units sum",
            "one of them missing",
            "Give both: the default grid is one of means.",
        )
    if rates is None:
        rates = [scale * rate for rate in DYNAMIC_RATES]
    if decays is None:
        decays = [scale * decay for decay in DYNAMIC_DECAYS]
    check_dynamic_grid(rates, decays, dynamic.rates.epsilon)
    return list(rates), list(decays)


class _Layout(NamedTuple):
    """How a model reads: streams x segments, or blocks of ``segment`` with some context."""

    streams: int
    segment: int
    context: int


def evaluate_checkpoint(
    path: Union[str, Path],
    data: Union[str, Path],
    options: Options,
    begin: Begin = lambda stage, tokens: lambda done: None,
) -> Dict[str, Any]:
    """Evaluate one checkpoint on one split.

    Args:
        path: saved by ``fairseq-train``.
        data: folder of binarised data.
        options: what to do.
        begin: told about each stage.

    Returns:
        The document: ``checkpoint``, ``data``, ``options``, ``tuning`` and ``figures``.

    Raises:
        ConfigurationError: options that are impossible, or do not fit the model.
        CheckpointError: no language model's checkpoint.
        DataError: data that are missing, or of another dictionary.
        UnsupportedError: a model that cannot be evaluated so.
    """
    options.check()
    overrides = parse_overrides(options.overrides)
    loaded = load_language_model(path, data, overrides)
    corpora = {
        split: open_corpus(data, split, loaded.dictionary, combine=split == TRAINING)
        for split in _splits_needed(options)
    }
    if torch.cuda.is_available() and not options.cpu:
        loaded.model.cuda()
    layout = _layout(loaded, options)
    reader = _reader(loaded, options, layout)
    if options.cache is not None and not getattr(reader, "shows_features", True):
        raise UnsupportedError(
            "a model that shows the states before its output layer, for the cache",
            f"arch {loaded.arch}", "Evaluate it without the cache.",
        )  # fmt: skip
    run = _Run(options, loaded, layout, reader, corpora, begin)
    if options.dynamic is not None:
        run.gather_statistics()
    if options.tune is not None:
        run.tune()
    figures = run.figures(path)
    dynamic = run.dynamic
    if dynamic is not None:
        dynamic = dataclasses.replace(dynamic, **dynamic.rates._asdict())
    chosen = dataclasses.asdict(
        dataclasses.replace(options, cache=run.cache, dynamic=dynamic, segment=layout.segment)
    )
    return finite(
        {
            "schema": SCHEMA,
            "command": "evaluate-lm",
            "versions": versions(),
            "threads": torch.get_num_threads(),
            "device": str(reader.device),
            "checkpoint": {
                "path": str(path),
                "sha256": loaded.sha256,
                "arch": loaded.arch,
                "stateful": loaded.stateful,
            },
            "data": {
                "path": str(data),
                "subset": options.subset,
                "words": len(loaded.dictionary),
                "dictionary_sha256": loaded.dictionary_sha256,
                "remark": loaded.remark,
            },
            "options": {**chosen, "overrides": overrides},
            "tuning": [_searched(search) for search in run.searches],
            "seconds": round(run.seconds, 3),
            "figures": figures,
        }
    )


def _splits_needed(options: Options) -> List[str]:
    needed = [options.subset]
    if options.tune is not None:
        needed.append(VALIDATION)
    if options.dynamic is not None:
        needed.append(TRAINING)
    return list(dict.fromkeys(needed))


def _layout(loaded: LanguageModel, options: Options) -> _Layout:
    trained = loaded.settings.get("tokens_per_sample") or DEFAULT_SEGMENT
    if not loaded.stateful:
        if options.streams != 1:
            raise ConfigurationError(
                "--streams 1 for a model without a state", str(options.streams),
                f"Leave it out: {loaded.arch} reads blocks that do not depend on each other.",
            )  # fmt: skip
        if options.segment is None:
            trained = min(int(trained), loaded.model.max_positions())
        return _Layout(1, options.segment or int(trained), options.context_window)
    if options.context_window:
        raise ConfigurationError(
            "no --context-window for a model with a state", str(options.context_window),
            f"Leave it out: {loaded.arch} carries its state from each segment to the next.",
        )  # fmt: skip
    usual = DYNAMIC_SEGMENT if options.dynamic is not None else int(trained)
    return _Layout(options.streams, options.segment or usual, 0)


def _reader(loaded: LanguageModel, options: Options, layout: _Layout) -> Reader:
    model, padding, start = loaded.model, loaded.padding, loaded.start
    if loaded.stateful:
        return StreamReader(model, padding, start, layout.streams, layout.segment)
    # An adapting model has to be updated between two blocks.
    rows = 1 if options.dynamic is not None else loaded.rows(layout.segment)
    return BlockReader(model, padding, start, layout.segment, layout.context, rows)


class _Run:
    """The stages of one evaluation, and what each leaves for the next."""

    def __init__(
        self,
        options: Options,
        loaded: LanguageModel,
        layout: _Layout,
        reader: Reader,
        corpora: Mapping[str, Corpus],
        begin: Begin,
    ) -> None:
        self.options = options
        self.loaded = loaded
        self.layout = layout
        self.reader = reader
        self.corpora = corpora
        self.begin = begin
        self.cache = options.cache
        self.dynamic = options.dynamic
        self.statistics: Optional[GradientStatistics] = None
        self.searches: List[GridSearch] = []
        self.seconds = 0.0

    def gather_statistics(self) -> None:
        """Gradients over the training split."""
        assert self.dynamic is not None
        corpus, loaded, layout = self.corpora[TRAINING], self.loaded, self.layout
        reader: Reader
        if loaded.stateful:
            size = self._batch_size(self.dynamic)
            if len(corpus) < size:
                raise DataError(
                    f"a training split of {size} tokens or more, one for each stream",
                    f"{len(corpus)} tokens", "Give a smaller --dynamic-batch-size.",
                )  # fmt: skip
            reader = StreamReader(loaded.model, loaded.padding, loaded.start, size, layout.segment)
            batch = size * layout.segment
        else:
            size = self._batch_size(self.dynamic)
            reader = BlockReader(
                loaded.model, loaded.padding, loaded.start, layout.segment, layout.context, size
            )
            batch = size * (layout.segment - layout.context)
        limit = self.dynamic.batches
        total = len(corpus) if limit is None else min(len(corpus), limit * batch)
        progress = self.begin("gradients of the training split", total)
        self.statistics = gradient_statistics(reader, corpus, limit, progress)

    def tune(self) -> None:
        """Search on the validation split, and go on with what is found best."""
        tune = self.options.tune
        assert tune is not None
        corpus = self.corpora[VALIDATION]
        if tune.tokens is not None:
            corpus = corpus[: tune.tokens]
        if self.dynamic is not None and self.statistics is not None:
            rates, decays = _dynamic_grid(self.dynamic, tune, self.layout.segment)
            options = [
                dataclasses.replace(self.dynamic, rate=rate, decay=decay)
                for rate in rates
                for decay in decays
            ]
            total = len(corpus) * len(options)
            search = search_dynamic(
                self.reader,
                corpus,
                self.statistics,
                [self._rates(one) for one in options],
                [{"rate": one.rates.rate, "decay": one.rates.decay} for one in options],
                self.begin(f"{len(options)} trials of dynamic evaluation", total),
            )
            self.searches.append(search)
            best = search.best.values
            self.dynamic = dataclasses.replace(self.dynamic, rate=best["rate"], decay=best["decay"])
        if self.cache is not None:
            grid = CacheGrid(self.cache.window, tune.cache_thetas, tune.cache_weights)
            progress = self.begin("the cache's grid", len(corpus))
            search = search_cache(self.reader, corpus, grid, self._adapting(), progress)
            self.searches.append(search)
            best = search.best.values
            self.cache = dataclasses.replace(self.cache, theta=best["theta"], weight=best["lambda"])

    def figures(self, path: Any) -> List[Dict[str, Any]]:
        """Evaluate the split; one entry a method, each from the same pass."""
        corpus = self.corpora[self.options.subset]
        grid = None
        if self.cache is not None:
            grid = CacheGrid(self.cache.window, [self.cache.theta], [self.cache.weight])
        progress = self.begin(self.options.subset, len(corpus))
        begun = time.perf_counter()
        dynamic = self._adapting()
        if dynamic is None:
            found = evaluate(self.reader, corpus, cache=grid, progress=progress)
        else:
            with dynamic:
                found = evaluate(
                    self.reader, corpus, cache=grid, update=dynamic.update, progress=progress
                )
        self.seconds = time.perf_counter() - begun
        method = "model" if dynamic is None else "dynamic evaluation"
        entries = [self._figure(method, found.nll, found.tokens, False)]
        if grid is not None:
            nll = found.cached[0][0]
            entries.append(self._figure(f"{method} + cache", nll, found.tokens, True))
        return entries

    def _adapting(self) -> Optional[DynamicEvaluation]:
        if self.dynamic is None or self.statistics is None:
            return None
        return DynamicEvaluation(self.loaded.model, self.statistics, self._rates(self.dynamic))

    def _rates(self, options: DynamicOptions) -> DynamicRates:
        rates = options.rates
        if options.units == "mean":
            return rates
        assert self.statistics is not None
        tensors = len(adapted_parameters(self.loaded.model))
        return rates.from_sums(self.statistics.batches, tensors)

    def _batch_size(self, options: DynamicOptions) -> int:
        usual = STATISTICS_STREAMS if self.loaded.stateful else STATISTICS_BLOCKS
        return options.batch_size or usual

    def _figure(self, method: str, nll: float, tokens: int, cached: bool) -> Dict[str, Any]:
        mean = nll / tokens
        return {
            "method": method,
            "tokens": tokens,
            "nll": mean,
            "bits": mean / math.log(2),
            "perplexity": perplexity(nll, tokens),
            "signature": self._signature(tokens, cached),
        }

    def _signature(self, tokens: int, cached: bool) -> str:
        layout, found = self.layout, versions()
        parts: Dict[str, Any] = {"subset": self.options.subset, "tokens": tokens}
        if self.loaded.stateful:
            parts.update(streams=layout.streams, segment=layout.segment)
        else:
            parts.update(block=layout.segment, context=layout.context)
        if cached and self.cache is not None:
            cache = self.cache
            parts["cache"] = f"window{cache.window},theta{cache.theta:g},lambda{cache.weight:g}"
        if self.dynamic is not None and self.statistics is not None:
            rate, decay, epsilon = self.dynamic.rates
            parts["dynamic"] = (
                f"eta{rate:g},lambda{decay:g},epsilon{epsilon:g},{self.dynamic.units},"
                f"{self.statistics.batches}x{self._batch_size(self.dynamic)}"
            )
        searched = [search for search in self.searches if cached or search.method != "cache"]
        if searched:
            parts["tuned"] = f"{VALIDATION}[:{searched[0].tokens}]"
        overrides = parse_overrides(self.options.overrides)
        if overrides:
            parts["overrides"] = ",".join(f"{name}={overrides[name]}" for name in sorted(overrides))
        parts.update(
            {
                "dict": self.loaded.dictionary_sha256[:12],
                "ckpt": self.loaded.sha256[:12],
                "version": found["spectral-fairseq"] or "source",
                "torch": found["torch"],
            }
        )
        return "|".join(f"{name}:{value}" for name, value in parts.items())


def _searched(search: GridSearch) -> Dict[str, Any]:
    return {
        "method": search.method,
        "subset": VALIDATION,
        "tokens": search.tokens,
        "best": {**search.best.values, "perplexity": search.best.perplexity},
        "points": [{**one.values, "perplexity": one.perplexity} for one in search.points],
    }
