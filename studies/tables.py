"""Print a table of the results of several runs: means over seeds, with their spread.

The folder holds folders ``METHOD/seed-N/``, each with a ``train.log``, which is fairseq's output
with ``--log-format json``, and a ``figures.json`` with the results of the evaluation. A run without
``figures.json`` is not finished and is left out. The same command serves translation and language
models:

    python examples/tables.py outputs/translation_opendocs_de_en --baseline plain

With ``--test``, two more columns say what the differences can bear: see :class:`Difference`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from pathlib import Path
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

from spectral_fairseq.commands.shared import print_anywhere
from spectral_fairseq.errors import DataError, SpectralFairseqError
from studies.significance import PairedT, holm, paired_t
from studies.text_tables import text_table
from studies.training_log import read_training_log

# method -> seed -> name -> number or text
Results = Dict[str, Dict[int, Dict[str, Any]]]

SEED = re.compile(r"seed-(\d+)")


class Column(NamedTuple):
    """Heading of a figure, and the function that formats its values."""

    heading: str
    show: Callable[[float], str]


def digits(count: int, scale: float = 1.0) -> Callable[[float], str]:
    """A function that shows ``scale`` times a number with so many digits after the point."""
    # Adding zero makes a negative zero positive.
    return lambda value: f"{round(scale * value, count) + 0.0:.{count}f}"


# Columns in their order; a column that no run has is left out.
COLUMNS: Dict[str, Column] = {
    "bleu": Column("sacreBLEU", digits(1)),
    "chrf": Column("chrF", digits(1)),
    "ter": Column("TER", digits(1)),
    "rare_recall": Column("rare-word recall, %", digits(1, 100)),
    "valid_ppl": Column("valid ppl", digits(2)),
    "test_ppl": Column("test ppl", digits(2)),
    "rare_test_ppl": Column("test ppl, rare words", digits(0)),
    "cache_test_ppl": Column("test ppl, cache", digits(2)),
    "dynamic_test_ppl": Column("test ppl, dynamic", digits(2)),
    "log_probability_rank": Column("rank of log P", digits(0)),
    "expected_pairwise_kl": Column("expected pairwise KL", digits(2)),
    "isotropy_as_is.I1_both_signs": Column("I1", digits(3)),
    "isotropy_as_is.I2_both_signs": Column("I2", digits(3)),
    "mean_cosine": Column("mean cosine", digits(3)),
    "sigma_last_to_first": Column("σ_d / σ_1", digits(3)),
    "seconds_per_update": Column("ms an update", digits(0, 1000)),
    "peak_bytes": Column("peak MiB", digits(0, 2**-20)),
}


def read(folder: Path) -> Results:
    """Read every figure of every finished run below ``folder``.

    Raises:
        DataError: no runs, a damaged file, or runs that cannot be compared.
    """
    results: Results = {}
    for path in sorted(folder.glob("*/seed-*")):
        match = SEED.fullmatch(path.name)
        figures = _figures(path) if match and path.is_dir() else {}
        if match and figures:
            results.setdefault(path.parent.name, {})[int(match.group(1))] = figures
    if not results:
        raise DataError(
            f"runs in {folder}",
            "no METHOD/seed-N/figures.json",
            "Name the folder in which METHOD/seed-N/ lie.",
        )
    _comparable(results)
    return results


def check_request(
    results: Results, baseline: Optional[str], columns: Optional[Sequence[str]]
) -> None:
    """Check that the baseline and the columns exist.

    Raises:
        DataError: a baseline or a column that is not there, or no column at all.
    """
    if baseline is not None and baseline not in results:
        raise DataError(
            f"runs of the baseline {baseline}",
            f"only {', '.join(sorted(results))}",
            "Choose --baseline from these.",
        )
    present = columns_of(results)
    missing = [name for name in columns or () if name not in present]
    if missing or not present:
        raise DataError(
            f"some run with {', '.join(missing) or 'a figure of ' + ', '.join(COLUMNS)}",
            f"only {', '.join(present) or 'others'}",
            "Choose --columns from what there is." if present else "Evaluate the runs anew.",
        )


def _figures(run: Path) -> Dict[str, Any]:
    """All figures of a finished run; empty for an unfinished one."""
    path = run / "figures.json"
    if not path.exists():
        return {}
    try:
        figures = flat(json.loads(path.read_text("utf-8")))
    except ValueError as error:
        raise DataError(f"JSON in {path}", str(error), "Remove it and measure again.") from None
    for name in COLUMNS:
        if isinstance(figures.get(name), str):
            raise DataError(
                f"a number as {name} in {path}", figures[name], "Remove it and measure again."
            )
    log = run / "train.log"
    return {**(read_training_log(log) if log.exists() else {}), **figures}


def flat(value: Any, prefix: str = "") -> Dict[str, Any]:
    """Numbers and texts of a JSON value under dotted names; lists are left out."""
    if not isinstance(value, dict):
        known = isinstance(value, (int, float, str)) and not isinstance(value, bool)
        return {prefix: value} if known else {}
    named: Dict[str, Any] = {}
    for key, inner in value.items():
        named.update(flat(inner, f"{prefix}.{key}" if prefix else key))
    return named


def _comparable(results: Results) -> None:
    """Check that all runs were scored alike and trained for equally many updates."""
    runs = [figures for seeds in results.values() for figures in seeds.values()]
    for name in sorted({name for figures in runs for name in figures}):
        if name.endswith("_signature") or name == "updates":
            found = {figures[name] for figures in runs if name in figures}
            if len(found) > 1:
                raise DataError(
                    f"one {name} in all runs",
                    ", ".join(map(str, sorted(found))),
                    "Make a folder for each budget and each way of scoring.",
                )


def columns_of(results: Results) -> List[str]:
    """Names from :data:`COLUMNS` that some run has, in that order."""
    present = {name for seeds in results.values() for run in seeds.values() for name in run}
    return [name for name in COLUMNS if name in present]


class Cell(NamedTuple):
    """Mean and sample standard deviation over ``seeds``; NaN if there is no deviation."""

    mean: float
    deviation: float
    seeds: int


def cell(values: Sequence[float]) -> Optional[Cell]:
    """Mean and deviation of values; None without a value."""
    if not values:
        return None
    count = len(values)
    if not all(map(math.isfinite, values)):  # training diverged; fmean() and stdev() may fail
        return Cell(sum(values) / count, math.nan, count)
    return Cell(
        statistics.fmean(values), statistics.stdev(values) if count > 1 else math.nan, count
    )


def summary(results: Results, baseline: Optional[str] = None) -> Dict[str, Dict[str, Any]]:
    """Mean and spread of every column, and of the differences from the baseline seed by seed.

    Returns:
        method -> column -> ``{"of": Cell, "difference": Cell or None}``.
    """
    rows: Dict[str, Dict[str, Any]] = {}
    for method in sorted(results, key=lambda name: (name != baseline, _natural(name))):
        rows[method] = {}
        for name in columns_of(results):
            of = cell([run[name] for run in results[method].values() if name in run])
            has_difference = baseline in results and method != baseline
            both = _paired(results, method, str(baseline), name) if has_difference else []
            difference = cell(both)
            rows[method][name] = {"of": of, "difference": difference}
    return rows


def _natural(name: str) -> List[Any]:
    """Sorting key with which ``mos-3`` comes before ``mos-15``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


class Difference(NamedTuple):
    """A tested difference of a method from the baseline.

    ``test`` has the mean difference, its 95 % interval, and the p of the hypothesis that it is
    zero; ``adjusted_p`` is this p after Holm's correction for the number of comparisons.
    """

    test: PairedT
    adjusted_p: float


def differences(
    results: Results,
    pairs: Iterable[Tuple[str, str]],
    column: str,
    planned: int = 0,
    seeds: int = 2,
) -> Dict[Tuple[str, str], Difference]:
    """The tested difference of each pair of methods, over the seeds that both have.

    Args:
        results: all figures.
        pairs: a method, and the one that it differs from.
        column: the figure.
        planned: the number of comparisons for which p is adjusted, if more than there are.
        seeds: how many a comparison needs; one with fewer counts as one that is still to be made,
            and its adjusted p is NaN.
    """
    values = {pair: _paired(results, *pair, column) for pair in pairs}
    tests = {pair: paired_t(found) for pair, found in values.items()}
    ps = [tests[pair].p if len(found) >= seeds else math.nan for pair, found in values.items()]
    # A comparison that is still to be made could have any p.
    missing = planned - sum(not math.isnan(p) for p in ps)
    adjusted = holm([*ps, *[1.0] * missing])
    return {pair: Difference(test, p) for (pair, test), p in zip(tests.items(), adjusted)}


def machine(figures: Mapping[str, Any]) -> Optional[str]:
    """The processor or GPU of a training, from its figures; None where they do not name it."""
    device = figures.get("device", figures.get("settings.device"))
    if "versions.gpu" in figures and device != "cpu":
        return str(figures["versions.gpu"])
    return figures.get("versions.processor")


def machines(results: Results, *methods: str) -> List[str]:
    """The processors and GPUs that the runs of some methods name."""
    found = {machine(run) for method in methods for run in results[method].values()}
    return sorted(name for name in found if name is not None)


def _paired(results: Results, method: str, baseline: str, column: str) -> List[float]:
    """The differences seed by seed; none where the runs name two kinds of machines.

    Rounding alone makes another training on another processor.
    """
    if len(machines(results, method, baseline)) > 1:
        return []
    base = results[baseline]
    return [
        run[column] - base[seed][column]
        for seed, run in sorted(results[method].items())
        if column in run and column in base.get(seed, {})
    ]


def differences_from(
    results: Results, baseline: str, column: str, planned: int = 0, seeds: int = 2
) -> Dict[str, Difference]:
    """:func:`differences` of every other method from ``baseline``, by the method."""
    pairs = [(method, baseline) for method in sorted(results) if method != baseline]
    found = differences(results, pairs, column, planned, seeds)
    return {method: difference for (method, _), difference in found.items()}


def p_text(p: float) -> str:
    """A p with three decimals, or that it is too small for them; empty if it is NaN."""
    if math.isnan(p):
        return ""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _tested(found: Optional[Difference], column: Column) -> List[str]:
    """The cells of the interval and of the adjusted p; empty where there are none."""
    if found is None or math.isnan(found.adjusted_p):
        return ["", ""]
    low, high = column.show(found.test.low), column.show(found.test.high)
    return [f"{low} to {high}", p_text(found.adjusted_p)]


def _spread(found: Optional[Cell], column: Column, signed: bool = False) -> str:
    if found is None:
        return ""
    sign = "+" if signed and found.mean >= 0 else ""
    spread = "" if math.isnan(found.deviation) else f" ± {column.show(found.deviation)}"
    return f"{sign}{column.show(found.mean)}{spread}"


def markdown(
    results: Results,
    baseline: Optional[str] = None,
    columns: Optional[Sequence[str]] = None,
    test: bool = False,
) -> str:
    """The table as Markdown, followed by what all runs have in common.

    With a baseline, columns after the first figure hold its differences and, with ``test``, their
    95 % intervals and adjusted p.
    """
    chosen = list(columns or columns_of(results))
    rows = summary(results, baseline)
    has_baseline = baseline in rows and len(rows) > 1
    headings = ["method", "seeds", *(COLUMNS[name].heading for name in chosen)]
    if has_baseline:
        headings.insert(3, f"{COLUMNS[chosen[0]].heading} minus {baseline}'s")
    tested: Dict[str, Difference] = {}
    if has_baseline and baseline and test:
        tested = differences_from(results, baseline, chosen[0])
        headings[4:4] = ["95 % interval", "p (Holm)"]
    cells = []
    for method, row in rows.items():
        shown = [_spread(row[name]["of"], COLUMNS[name]) for name in chosen]
        if has_baseline:
            first = chosen[0]
            shown.insert(1, _spread(row[first]["difference"], COLUMNS[first], signed=True))
            if test:
                shown[2:2] = _tested(tested.get(method), COLUMNS[first])
        cells.append([method, str(len(results[method])), *shown])
    lines = [text_table(cells, headings, "pipe")]
    lines += ["", "Mean ± sample standard deviation over seeds; differences are seed by seed."]
    if tested:
        number = sum(not math.isnan(one.adjusted_p) for one in tested.values())
        lines += [f"Student's t interval of the paired differences; p by Holm over {number}."]
    lines += [f"`{signature}`" for signature in _shared(results, "_signature")]
    updates = _shared(results, "updates")
    lines += [f"{number} updates each." for number in updates]
    return "\n".join(lines) + "\n"


def _shared(results: Results, ending: str) -> List[Any]:
    """Distinct values of the figures whose names have this ending."""
    found: Dict[Any, None] = {}
    for seeds in results.values():
        for run in seeds.values():
            for name in sorted(run):
                if name.endswith(ending) and "." not in name:
                    found[run[name]] = None
    return list(found)


def parse_arguments(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="holds METHOD/seed-N/")
    parser.add_argument("--baseline", metavar="METHOD", help="also show differences from it")
    parser.add_argument(
        "--columns",
        nargs="+",
        choices=list(COLUMNS),
        metavar="FIGURE",
        help=f"which, and in which order: {', '.join(COLUMNS)} (default: those there are)",
    )
    parser.add_argument(
        "--test",
        action="store_true",
        help="with --baseline: add 95 %% intervals of the differences, and p values that are "
        "adjusted for the number of methods",
    )
    parser.add_argument("--format", choices=("markdown", "json"), default="markdown")
    arguments = parser.parse_args(argv)
    if arguments.test and arguments.baseline is None:
        parser.error("expected --baseline with --test; found none")
    return arguments


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; returns the exit status."""
    arguments = parse_arguments(argv)
    print_anywhere()
    try:
        results = read(arguments.folder)
        check_request(results, arguments.baseline, arguments.columns)
        if arguments.format == "json":
            document = _as_json(summary(results, arguments.baseline))
            if arguments.test:
                _add_tests(document, results, arguments.baseline)
            print(json.dumps(document, indent=2))
        else:
            table = markdown(results, arguments.baseline, arguments.columns, arguments.test)
            print(table, end="")
    except SpectralFairseqError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _as_json(rows: Dict[str, Dict[str, Any]]) -> Dict[str, Any]:
    def plain(found: Optional[Cell]) -> Optional[Dict[str, Any]]:
        if found is None:
            return None
        mean, deviation = (
            value if math.isfinite(value) else None for value in (found.mean, found.deviation)
        )
        return {"mean": mean, "standard_deviation": deviation, "seeds": found.seeds}

    return {
        method: {name: {key: plain(found) for key, found in of.items()} for name, of in row.items()}
        for method, row in rows.items()
    }


def _add_tests(document: Dict[str, Any], results: Results, baseline: str) -> None:
    """Give every figure of every method a ``test``, with None for what there is not."""
    for name in columns_of(results):
        for method, found in differences_from(results, baseline, name).items():
            figures = {**found.test._asdict(), "adjusted_p": found.adjusted_p}
            document[method][name]["test"] = {
                key: value if math.isfinite(value) else None for key, value in figures.items()
            }
