"""The JSON document of an evaluation, in which each figure carries its signature."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, List, Optional

from spectral_fairseq.lm.evaluation import perplexity
from spectral_fairseq.lm.tuning import GridSearch
from spectral_fairseq.provenance import signature
from spectral_fairseq.tools.evaluate_lm.layout import Layout
from spectral_fairseq.tools.evaluate_lm.options import VALIDATION, CacheOptions, DynamicOptions
from spectral_fairseq.tools.evaluate_lm.tuning import ends_reached
from spectral_fairseq.tools.language_models.loading import LanguageModel

SCHEMA = "spectral-fairseq/evaluate-lm/1"


@dataclasses.dataclass
class Figure:
    """One perplexity and what decided it.

    Attributes:
        method: ``model``, ``dynamic evaluation``, either of them with ``+ cache``.
        nll: negative log-likelihood summed over the split, in nats.
        tokens: of the split, ends of sentences included.
        cache: None without a cache.
        dynamic: None for the model as it was trained.
        batches: gradient statistics behind ``dynamic``, as ``<batches>x<size of each>``.
        searches: grid searches that chose the values of ``cache`` and ``dynamic``.
    """

    method: str
    nll: float
    tokens: int
    cache: Optional[CacheOptions] = None
    dynamic: Optional[DynamicOptions] = None
    batches: str = ""
    searches: List[GridSearch] = dataclasses.field(default_factory=list)


def figure_entry(
    figure: Figure, loaded: LanguageModel, layout: Layout, subset: str, overrides: Dict[str, Any]
) -> Dict[str, Any]:
    """One entry of ``figures``: perplexity, bits and nats a token, and the signature."""
    parts: Dict[str, Any] = {"subset": subset, "tokens": figure.tokens}
    parts.update(layout.described(loaded.stateful))
    if figure.cache is not None:
        cache = figure.cache
        theta, weight = cache.values
        parts["cache"] = f"window{cache.window},theta{theta:g},lambda{weight:g}"
    if figure.dynamic is not None:
        rate, decay, epsilon = figure.dynamic.rates
        parts["dynamic"] = (
            f"eta{rate:g},lambda{decay:g},epsilon{epsilon:g},{figure.dynamic.units},"
            f"{figure.batches}"
        )
    if figure.searches:
        parts["tuned"] = f"{VALIDATION}[:{figure.searches[0].tokens}]"
    if overrides:
        parts["overrides"] = ",".join(f"{name}={overrides[name]}" for name in sorted(overrides))
    parts.update(dict=loaded.dictionary_sha256[:12], ckpt=loaded.sha256[:12])
    mean = figure.nll / figure.tokens
    return {
        "method": figure.method,
        "tokens": figure.tokens,
        "nll": mean,
        "bits": mean / math.log(2),
        "perplexity": perplexity(figure.nll, figure.tokens),
        "signature": signature(parts),
    }


def search_entry(search: GridSearch) -> Dict[str, Any]:
    """One entry of ``tuning``: all points, the best, and whether it lies at the grid's end."""
    return {
        "method": search.method,
        "subset": VALIDATION,
        "tokens": search.tokens,
        "best": {**search.best.values, "perplexity": search.best.perplexity},
        "ends": ends_reached(search),
        "points": [{**one.values, "perplexity": one.perplexity} for one in search.points],
    }
