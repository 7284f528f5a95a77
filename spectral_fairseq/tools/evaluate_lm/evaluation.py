"""Perplexity of a language model's checkpoint: static, with a cache, or adapting to the text.

The mathematics is in :mod:`spectral_fairseq.lm.evaluation` and its neighbours: the continuous cache
(Grave et al., ICLR 2017, https://openreview.net/forum?id=B184E5qee) and dynamic evaluation (Krause
et al., ICML 2018, https://arxiv.org/abs/1709.07432).
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Union

import torch

from spectral_fairseq.errors import DataError, UnsupportedError
from spectral_fairseq.functional.adaptation import DynamicRates
from spectral_fairseq.functional.products import ProgressCallback
from spectral_fairseq.lm.dynamic_evaluation import (
    DynamicEvaluation,
    GradientStatistics,
    adapted_parameters,
    gradient_statistics,
)
from spectral_fairseq.lm.evaluation import CacheGrid, Corpus, evaluate
from spectral_fairseq.lm.tuning import GridSearch, search_cache, search_dynamic
from spectral_fairseq.provenance import finite, versions
from spectral_fairseq.tools.evaluate_lm.checks import check
from spectral_fairseq.tools.evaluate_lm.document import SCHEMA, Figure, figure_entry, search_entry
from spectral_fairseq.tools.evaluate_lm.layout import choose_layout, reader_for
from spectral_fairseq.tools.evaluate_lm.options import VALIDATION, DynamicOptions, Options
from spectral_fairseq.tools.evaluate_lm.tuning import (
    Axes,
    cache_axes,
    dynamic_axes,
)
from spectral_fairseq.tools.language_models.corpus import open_corpus
from spectral_fairseq.tools.language_models.loading import LanguageModel, load_language_model
from spectral_fairseq.tools.language_models.overrides import parse_overrides

TRAINING = "train"
# A batch of the published gradient statistics is 100 streams x 5 tokens, about one block.
STATISTICS_STREAMS, STATISTICS_BLOCKS = 100, 1

Begin = Callable[[str, int], ProgressCallback]
"""Called with the name of a stage and its number of tokens; returns a callback that counts them."""


def evaluate_checkpoint(
    path: Union[str, Path],
    data: Union[str, Path],
    options: Options,
    begin: Begin = lambda *_: lambda _: None,
    verify: bool = True,
) -> Dict[str, Any]:
    """Evaluate one checkpoint on one split.

    Args:
        path: saved by ``fairseq-train``.
        data: folder of binarised data.
        options: what to do.
        begin: called at the start of each stage.
        verify: as of :func:`~spectral_fairseq.checkpoints.reading.load_checkpoint`.

    Returns:
        The document: ``checkpoint``, ``data``, ``options``, ``tuning`` and ``figures``.

    Raises:
        ConfigurationError: options that are impossible, or do not fit the model.
        CheckpointError: no language model's checkpoint.
        DataError: data that are missing, or of another dictionary.
        UnsupportedError: a model that cannot be evaluated token by token.
    """
    check(options)
    overrides = parse_overrides(options.overrides)
    loaded = load_language_model(path, data, overrides, verify)
    splits = [options.subset]
    splits += [VALIDATION] if options.tune is not None else []
    splits += [TRAINING] if options.dynamic is not None else []
    corpora = {
        split: open_corpus(data, split, loaded.dictionary, combine=split == TRAINING)
        for split in dict.fromkeys(splits)
    }
    if torch.cuda.is_available() and not options.cpu:
        loaded.model.cuda()
    run = _Run(options, loaded, corpora, begin)
    figures = run.figures()
    chosen = dataclasses.replace(
        options,
        cache=None if run.cache is None else run.cache.completed(),
        dynamic=None if run.dynamic is None else run.dynamic.completed(),
        segment=run.layout.segment,
    )
    return finite(
        {
            "schema": SCHEMA,
            "command": "evaluate-lm",
            "versions": versions(),
            "threads": torch.get_num_threads(),
            "device": str(run.reader.device),
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
            "options": {**dataclasses.asdict(chosen), "overrides": overrides},
            "tuning": [search_entry(search) for search in run.searches],
            "seconds": round(run.seconds, 3),
            "figures": [
                figure_entry(figure, loaded, run.layout, options.subset, overrides)
                for figure in figures
            ],
        }
    )


class _Run:
    """One evaluation: gradient statistics, then the search, then the split itself.

    Attributes:
        cache: the options of the cache; with --tune, the best ones after the search.
        dynamic: those of dynamic evaluation, likewise.
        searches: the searches made.
        seconds: time that the evaluation of the split itself took.
    """

    def __init__(
        self,
        options: Options,
        loaded: LanguageModel,
        corpora: Mapping[str, Corpus],
        begin: Begin,
    ) -> None:
        self.options = options
        self.loaded = loaded
        self.corpora = corpora
        self.begin = begin
        self.layout = choose_layout(loaded, options)
        # An adapting model has to be updated between two blocks.
        rows = 1 if options.dynamic is not None else loaded.rows(self.layout.segment)
        self.reader = reader_for(loaded, self.layout, rows)
        if options.cache is not None and not getattr(self.reader, "shows_features", True):
            raise UnsupportedError(
                "a model that returns the hidden states before its output layer, for the cache",
                f"arch {loaded.arch}",
                "Evaluate it without the cache.",
            )
        self.cache = options.cache
        self.dynamic = options.dynamic
        self.statistics: Optional[GradientStatistics] = None
        self.searches: List[GridSearch] = []
        self.seconds = 0.0

    def figures(self) -> List[Figure]:
        """All stages; the static model comes first, then each method from one common pass."""
        if self.dynamic is not None:
            self.statistics = self._gather_statistics()
        if self.options.tune is not None:
            self._tune()
        corpus = self.corpora[self.options.subset]
        found = []
        if self.dynamic is not None:
            progress = self.begin(f"{self.options.subset}, static", len(corpus))
            static = evaluate(self.reader, corpus, progress=progress)
            found.append(Figure("model", static.nll, static.tokens))
        return found + self._evaluate(corpus)

    def _evaluate(self, corpus: Corpus) -> List[Figure]:
        grid = None
        if self.cache is not None:
            theta, weight = self.cache.values
            grid = CacheGrid(self.cache.window, [theta], [weight])
        progress = self.begin(self.options.subset, len(corpus))
        begun = time.perf_counter()
        dynamic = self._adapting()
        if dynamic is None:
            sums = evaluate(self.reader, corpus, cache=grid, progress=progress)
        else:
            with dynamic:
                sums = evaluate(
                    self.reader, corpus, cache=grid, update=dynamic.update, progress=progress
                )
        self.seconds = time.perf_counter() - begun
        plain = Figure("model", sums.nll, sums.tokens)
        if self.dynamic is not None and self.statistics is not None:
            plain.method = "dynamic evaluation"
            plain.dynamic = self.dynamic
            plain.batches = f"{self.statistics.batches}x{self._batch_size(self.dynamic)}"
            plain.searches = [one for one in self.searches if one.method == "dynamic"]
        if grid is None:
            return [plain]
        cached = dataclasses.replace(
            plain,
            method=f"{plain.method} + cache",
            nll=sums.cached[0][0],
            cache=self.cache,
            searches=self.searches,
        )
        return [plain, cached]

    def _gather_statistics(self) -> GradientStatistics:
        """Mean squared gradients over the training split."""
        assert self.dynamic is not None
        corpus, loaded, layout = self.corpora[TRAINING], self.loaded, self.layout
        size = self._batch_size(self.dynamic)
        if loaded.stateful and len(corpus) < size:
            raise DataError(
                f"a training split of {size} tokens or more, one for each stream",
                f"{len(corpus)} tokens",
                "Give a smaller --dynamic-batch-size.",
            )
        reader = reader_for(loaded, layout._replace(streams=size), size)
        limit = self.dynamic.batches
        batch = size * (layout.segment - layout.context)
        total = len(corpus) if limit is None else min(len(corpus), limit * batch)
        progress = self.begin("gradients of the training split", total)
        return gradient_statistics(reader, corpus, limit, progress)

    def _tune(self) -> None:
        """Search on the validation split, and keep the best values."""
        tune = self.options.tune
        assert tune is not None
        corpus = self.corpora[VALIDATION]
        if tune.tokens is not None:
            corpus = corpus[: tune.tokens]
        if self.dynamic is not None:
            axes = dynamic_axes(self.dynamic, tune, self.layout.segment)
            search = self._search_dynamic(corpus, axes)
            self.searches.append(search)
            best = search.best.values
            self.dynamic = dataclasses.replace(self.dynamic, rate=best["rate"], decay=best["decay"])
        if self.cache is not None:
            axes = cache_axes(self.cache, tune)
            search = self._search_cache(corpus, axes)
            self.searches.append(search)
            best = search.best.values
            self.cache = dataclasses.replace(self.cache, theta=best["theta"], weight=best["lambda"])

    def _search_dynamic(self, corpus: Corpus, axes: Axes) -> GridSearch:
        assert self.dynamic is not None and self.statistics is not None
        labels = [
            {"rate": rate, "decay": decay} for rate in axes["rate"] for decay in axes["decay"]
        ]
        trials = [
            dataclasses.replace(self.dynamic, rate=label["rate"], decay=label["decay"])
            for label in labels
        ]
        progress = self.begin(
            f"{len(trials)} trials of dynamic evaluation", len(corpus) * len(trials)
        )
        rates = [self._rates(trial) for trial in trials]
        return search_dynamic(self.reader, corpus, self.statistics, rates, labels, progress)

    def _search_cache(self, corpus: Corpus, axes: Axes) -> GridSearch:
        assert self.cache is not None
        grid = CacheGrid(self.cache.window, axes["theta"], axes["lambda"])
        progress = self.begin("the cache's grid", len(corpus))
        return search_cache(self.reader, corpus, grid, self._adapting(), progress)

    def _adapting(self) -> Optional[DynamicEvaluation]:
        if self.dynamic is None or self.statistics is None:
            return None
        return DynamicEvaluation(self.loaded.model, self.statistics, self._rates(self.dynamic))

    def _rates(self, options: DynamicOptions) -> DynamicRates:
        rates = DynamicRates(*options.rates)
        if options.units == "mean":
            return rates
        assert self.statistics is not None
        tensors = len(adapted_parameters(self.loaded.model))
        return rates.from_sums(self.statistics.batches, tensors)

    def _batch_size(self, options: DynamicOptions) -> int:
        usual = STATISTICS_STREAMS if self.loaded.stateful else STATISTICS_BLOCKS
        return options.batch_size or usual
