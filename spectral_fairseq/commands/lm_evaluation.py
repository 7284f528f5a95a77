"""Perplexity of a language model's checkpoint: static, with a cache, or adapting to the text.

The continuous cache is in :mod:`spectral_fairseq.lm.continuous_cache`, dynamic evaluation in
:mod:`spectral_fairseq.lm.dynamic_evaluation`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Union

import torch

from spectral_fairseq.commands.lm_grids import cache_axes, dynamic_axes
from spectral_fairseq.commands.lm_options import (
    VALIDATION,
    DynamicOptions,
    EvaluationOptions,
    TuneOptions,
)
from spectral_fairseq.commands.models import (
    LanguageModel,
    by_eval_lm,
    load_language_model,
    open_corpus,
)
from spectral_fairseq.commands.overrides import parse_overrides
from spectral_fairseq.errors import UnsupportedError, check_enough
from spectral_fairseq.functional.progress import ProgressCallback
from spectral_fairseq.lm.continuous_cache import CacheGrid
from spectral_fairseq.lm.dynamic_evaluation import (
    DynamicEvaluation,
    DynamicRates,
    GradientStatistics,
    adapted_parameters,
    check_rates,
    evaluate_adapting,
    gradient_statistics,
)
from spectral_fairseq.lm.evaluation import StreamReader, evaluate, perplexity
from spectral_fairseq.lm.grid_search import (
    DYNAMIC_SEGMENT,
    GridSearch,
    search_cache,
    search_dynamic,
)
from spectral_fairseq.lm.streams import Corpus
from spectral_fairseq.provenance import finite, signature, versions

DEFAULT_SEGMENT = 70
SCHEMA = "spectral-fairseq/evaluate-lm/1"
TRAINING = "train"

Begin = Callable[[str, int], ProgressCallback]
"""Called with the name of a stage and its number of tokens; returns a callback that counts them."""


def evaluate_checkpoint(
    path: Union[str, Path],
    data: Union[str, Path],
    options: EvaluationOptions,
    begin: Begin = lambda *_: lambda _: None,
    verify: bool = True,
) -> Dict[str, Any]:
    """Evaluate one checkpoint on one split.

    Returns:
        The document: ``checkpoint``, ``data``, ``options``, ``tuning`` and ``figures``.
    """
    check(options)
    overrides = parse_overrides(options.overrides)
    loaded = load_language_model(path, data, overrides, verify)
    if not loaded.stateful:
        wanted = "a language model that carries a state (awd_lstm_*, transformer_xl_*)"
        raise UnsupportedError(wanted, f"one of arch {loaded.arch}", by_eval_lm())
    splits = [options.subset]
    splits += [VALIDATION] if options.tune is not None else []
    splits += [TRAINING] if options.dynamic is not None else []
    corpora = {
        split: open_corpus(data, split, loaded.dictionary, combine=split == TRAINING)
        for split in dict.fromkeys(splits)
    }
    if torch.cuda.is_available() and not options.cpu:
        loaded.model.cuda()
    run = _Run(options, overrides, loaded, corpora, begin)
    figures = run.figures()
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
            },
            "data": {
                "path": str(data),
                "subset": options.subset,
                "words": len(loaded.dictionary),
                "dictionary_sha256": loaded.dictionary_sha256,
                "remark": loaded.remark,
            },
            "options": run.chosen_options(),
            "tuning": [_search_as_json(search) for search in run.searches],
            "seconds": round(run.seconds, 3),
            "figures": figures,
        }
    )


def _search_as_json(search: GridSearch) -> Dict[str, Any]:
    return {
        "method": search.method,
        "subset": VALIDATION,
        "tokens": search.tokens,
        "best": search.best,
        "ends": search.ends,
        "points": search.points,
    }


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
        options: EvaluationOptions,
        overrides: Mapping[str, Any],
        loaded: LanguageModel,
        corpora: Mapping[str, Corpus],
        begin: Begin,
    ) -> None:
        self.options, self.overrides = options, overrides
        self.loaded = loaded
        self.corpora = corpora
        self.begin = begin
        trained = int(loaded.settings.get("tokens_per_sample") or DEFAULT_SEGMENT)
        usual = trained if options.dynamic is None else DYNAMIC_SEGMENT
        self.segment = options.segment or usual
        self.reader = self._reader(options.streams)
        self.cache = options.cache
        self.dynamic = options.dynamic
        self.statistics: Optional[GradientStatistics] = None
        self.searches: List[GridSearch] = []
        self.seconds = 0.0

    def _reader(self, streams: int) -> StreamReader:
        """What cuts a corpus into so many streams for this model."""
        loaded = self.loaded
        return StreamReader(loaded.model, loaded.padding, loaded.start, streams, self.segment)

    def figures(self) -> List[Dict[str, Any]]:
        """All stages; the static model comes first, then each method from one common pass."""
        if self.dynamic is not None:
            self.statistics = self._gather_statistics(self.dynamic)
        if self.options.tune is not None:
            self._tune(self.options.tune)
        corpus = self.corpora[self.options.subset]
        figures = []
        if self.dynamic is not None:
            progress = self.begin(f"{self.options.subset}, static", len(corpus))
            static = evaluate(self.reader, corpus, progress=progress)
            figures.append(self._figure("model", static.nll, static.tokens, []))
        return figures + self._evaluate(corpus)

    def chosen_options(self) -> Dict[str, Any]:
        """The options with what was left open: the best values of a search, and those published."""
        chosen = dataclasses.replace(
            self.options,
            cache=None if self.cache is None else self.cache.completed(),
            dynamic=None if self.dynamic is None else self.dynamic.completed(),
            segment=self.segment,
        )
        return {**dataclasses.asdict(chosen), "overrides": self.overrides}

    def _evaluate(self, corpus: Corpus) -> List[Dict[str, Any]]:
        grid = None
        if self.cache is not None:
            theta, weight = self.cache.values
            grid = CacheGrid(self.cache.window, [theta], [weight])
        progress = self.begin(self.options.subset, len(corpus))
        begun = time.perf_counter()
        sums = evaluate_adapting(
            self.reader, corpus, self._adapting(), cache=grid, progress=progress
        )
        self.seconds = time.perf_counter() - begun
        method, how = "model", {}
        searches: List[GridSearch] = []
        if self.dynamic is not None and self.statistics is not None:
            method = "dynamic evaluation"
            searches = [search for search in self.searches if search.method == "dynamic"]
            rate, decay, epsilon = self.dynamic.rates
            how["dynamic"] = (
                f"eta{rate:g},lambda{decay:g},epsilon{epsilon:g},{self.dynamic.units},"
                f"{self.statistics.batches}x{self.dynamic.statistics_streams}"
            )
        figures = [self._figure(method, sums.nll, sums.tokens, searches, **how)]
        if grid is not None:
            ((theta,), (weight,)) = grid.thetas, grid.weights
            how = {"cache": f"window{grid.window},theta{theta:g},lambda{weight:g}", **how}
            method, nll = f"{method} + cache", sums.cached[0][0]
            figures.append(self._figure(method, nll, sums.tokens, self.searches, **how))
        return figures

    def _figure(
        self, method: str, nll: float, tokens: int, searches: Sequence[GridSearch], **how: str
    ) -> Dict[str, Any]:
        """One entry of ``figures``: perplexity, bits and nats a token, and the signature.

        Args:
            method: ``model``, ``dynamic evaluation``, either of them with ``+ cache``.
            nll: negative log-likelihood summed over the split.
            tokens: of the split, ends of sentences included.
            searches: that chose the values of the method.
            **how: the values of ``cache`` and ``dynamic``, where the method has them.
        """
        loaded, overrides = self.loaded, self.overrides
        parts: Dict[str, Any] = {"subset": self.options.subset, "tokens": tokens}
        parts.update(streams=self.options.streams, segment=self.segment, **how)
        if searches:
            parts["tuned"] = f"{VALIDATION}[:{searches[0].tokens}]"
        if overrides:
            parts["overrides"] = ",".join(f"{name}={overrides[name]}" for name in sorted(overrides))
        parts.update(dict=loaded.dictionary_sha256[:12], ckpt=loaded.sha256[:12])
        mean = nll / tokens
        return {
            "method": method,
            "tokens": tokens,
            "nll": mean,
            "bits": mean / math.log(2),
            "perplexity": perplexity(nll, tokens),
            "signature": signature(parts),
        }

    def _gather_statistics(self, dynamic: DynamicOptions) -> GradientStatistics:
        """Mean squared gradients over the training split."""
        corpus, size, limit = self.corpora[TRAINING], dynamic.statistics_streams, dynamic.batches
        what = "tokens in the training split, one for each stream"
        check_enough(len(corpus), size, what, "Give a smaller --dynamic-batch-size.")
        read = len(corpus) if limit is None else min(len(corpus), limit * size * self.segment)
        progress = self.begin("gradients of the training split", read)
        return gradient_statistics(self._reader(size), corpus, limit, progress)

    def _tune(self, tune: TuneOptions) -> None:
        """Search on the validation split, and keep the best values."""
        corpus = self.corpora[VALIDATION]
        if tune.tokens is not None:
            corpus = corpus[: tune.tokens]
        if self.dynamic is not None and self.statistics is not None:
            axes = dynamic_axes(self.dynamic, tune, self.segment)
            labels: List[Dict[str, Any]] = [
                {"rate": rate, "decay": decay} for rate in axes["rate"] for decay in axes["decay"]
            ]
            rates = [
                self._rates(dataclasses.replace(self.dynamic, **label), self.statistics)
                for label in labels
            ]
            stage = f"{len(labels)} trials of dynamic evaluation"
            progress = self.begin(stage, len(corpus) * len(labels))
            search = search_dynamic(self.reader, corpus, self.statistics, rates, labels, progress)
            self.searches.append(search)
            best = search.best
            self.dynamic = dataclasses.replace(self.dynamic, rate=best["rate"], decay=best["decay"])
        if self.cache is not None:
            axes = cache_axes(self.cache, tune)
            grid = CacheGrid(self.cache.window, axes["theta"], axes["lambda"])
            progress = self.begin("the cache's grid", len(corpus))
            search = search_cache(self.reader, corpus, grid, self._adapting(), progress)
            self.searches.append(search)
            best = search.best
            self.cache = dataclasses.replace(self.cache, theta=best["theta"], weight=best["lambda"])

    def _adapting(self) -> Optional[DynamicEvaluation]:
        if self.dynamic is None or self.statistics is None:
            return None
        rates = self._rates(self.dynamic, self.statistics)
        return DynamicEvaluation(self.loaded.model, self.statistics, rates)

    def _rates(self, options: DynamicOptions, statistics: GradientStatistics) -> DynamicRates:
        rates = DynamicRates(*options.rates)
        if options.units == "mean":
            return rates
        return rates.from_sums(statistics.batches, len(adapted_parameters(self.loaded.model)))


def check(options: EvaluationOptions) -> None:
    """Refuse options that no model can be evaluated with."""
    options.check()
    cache, dynamic, tune = options.cache, options.dynamic, options.tune
    if cache is not None:
        theta, weight = cache.values
        CacheGrid(cache.window, [theta], [weight]).check()
    if dynamic is not None:
        check_rates(DynamicRates(*dynamic.rates))
    if tune is None:
        return
    if cache is not None:
        axes = cache_axes(cache, tune)
        CacheGrid(cache.window, axes["theta"], axes["lambda"]).check()
    if dynamic is not None:
        dynamic_axes(dynamic, tune, DYNAMIC_SEGMENT)
