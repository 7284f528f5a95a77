"""Pictures of a document of results, as in the papers.

The colours are those of Okabe and Ito, which colour-blind readers can tell apart. Every curve has
its own dash pattern, so that a grey print can be read too. The pictures are narrow and their
legends lie below them, so that they can be read on a phone.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

from spectral_fairseq.analysis.catalogue import ALL, cosine_shown, shown
from spectral_fairseq.analysis.drawing import GROUND, INK, Draw, Picture, import_matplotlib
from spectral_fairseq.analysis.results import Analysed
from spectral_fairseq.analysis.selection import follows_one_run, spread

ORIGIN = "#C0392B"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 3)))
# Curves beyond this are told apart by neither colour nor dashes.
MOST_CURVES = len(COLOURS)
MOST_PROJECTIONS = 6
SIZE = (5.2, 3.8)

# The report shows the first pictures at once: the spectrum and the cosines.
OPENING = 2

# Drawn only where the results have data for them.
OCCASIONAL = ("projection", "norms_by_count", "log_probabilities", "layers", "history")

HISTORY = ("i1", "i2", "mean_cosine", "sigma_over_edge_centred", "effective_rank", "isoscore")


def draw_all(document: Mapping[str, Any], analysed: Sequence[Analysed] = ()) -> List[Picture]:
    """All pictures that the results have data for.

    The points of the projected words are not in the document: without ``analysed``, as where it was
    read from a file, they are not drawn.
    """
    checkpoints = document["checkpoints"]
    drawn = spread(checkpoints, MOST_CURVES)
    # Two tables of one kind of model have nearly the same curve on a logarithmic scale.
    opening = [_absolute_spectra(drawn), _cosines(drawn)]
    pictures = [*(opening if len(checkpoints) == 1 else reversed(opening)), _spectra(drawn)]
    if analysed:
        kind = document["options"]["projection"]
        pictures.append(
            _projections(
                kind, spread(checkpoints, MOST_PROJECTIONS), spread(analysed, MOST_PROJECTIONS)
            )
        )
    counted = [checkpoint for checkpoint in drawn if checkpoint["counts"]]
    if counted:
        pictures.append(_norms_by_count(counted))
    run = [checkpoint for checkpoint in drawn if checkpoint["outputs"]]
    if run:
        pictures.append(log_probability_spectra(run))
    layered = [checkpoint for checkpoint in run if checkpoint["outputs"]["layers"]]
    if layered:
        pictures.append(_layers(layered))
    if len(drawn) < len(checkpoints):
        for picture in pictures:
            picture.alt += f" Drawn are some of {len(checkpoints)} checkpoints, evenly spaced."
    if follows_one_run(checkpoints):
        pictures.append(_history(checkpoints))
    return pictures


def _curve(index: int) -> Dict[str, Any]:
    return {"color": COLOURS[index], "linestyle": DASHES[index], "linewidth": 1.8}


def _line(axes: Any, index: int, label: str, values: Sequence[float]) -> None:
    """The curve of one model over the ranks from 1 on."""
    axes.plot(range(1, len(values) + 1), values, label=_literal(label), **_curve(index))


def _panel(fill: Callable[[Any], Any], **settings: Any) -> Draw:
    """A figure of one pair of axes, which ``fill`` draws into; what it returns are settings too."""

    def draw(pyplot: Any) -> Any:
        figure, axes = pyplot.subplots(figsize=SIZE)
        more = fill(axes) or {}
        axes.set(**settings, **more)
        _legend(axes)
        return figure

    return draw


def _for_each(
    checkpoints: Sequence[Mapping[str, Any]], figures: Callable[[Mapping[str, Any]], str]
) -> str:
    """The main figures of each model, for those who cannot see a picture."""
    return "; ".join(f"{checkpoint['label']}: {figures(checkpoint)}" for checkpoint in checkpoints)


def _literal(label: str) -> str:
    """A name as it is: matplotlib sets what is between dollars, and hides names that begin _."""
    escaped = label.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def _legend(axes: Any, below: float = 0.18) -> None:
    """Below the axes, where it covers no curve and leaves them the whole width."""
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, -below), borderaxespad=0.0)


def _ordered_by(checkpoints: Sequence[Mapping[str, Any]]) -> str:
    """What the places of words are: known counts give ranks, otherwise they are rows."""
    kinds = {checkpoint["frequency_order"] for checkpoint in checkpoints}
    if kinds == {"counts"}:
        return "frequency rank"
    return "row index" if kinds == {"rows"} else "frequency rank (row index without a dictionary)"


def _priors(checkpoints: Sequence[Mapping[str, Any]]) -> List[Tuple[int, str, List[float]]]:
    """Each different normalised prior once: place of its first checkpoint, name, values."""
    priors: List[Tuple[int, str, List[float]]] = []
    for index, checkpoint in enumerate(checkpoints):
        if checkpoint["prior"]:
            values = [value / checkpoint["prior"][0] for value in checkpoint["prior"]]
            known = (other for _, _, other in priors if len(other) == len(values))
            if not any(max(abs(a - b) for a, b in zip(values, other)) < 1e-3 for other in known):
                priors.append((index, f"{checkpoint['label']}, prior", values))
    return priors if len(priors) != 1 else [(priors[0][0], "prior", priors[0][2])]


def _spectra(checkpoints: Sequence[Mapping[str, Any]]) -> Picture:
    def fill(axes: Any) -> None:
        for index, checkpoint in enumerate(checkpoints):
            sigma = checkpoint["singular_values"]
            _line(axes, index, checkpoint["label"], [s / sigma[0] for s in sigma])
        for index, label, values in _priors(checkpoints):
            axes.plot(
                range(1, len(values) + 1),
                values,
                label=_literal(label),
                color=COLOURS[index],
                linewidth=0.9,
                marker="o",
                markersize=3,
                markevery=max(len(values) // 12, 1),
                markerfacecolor="none",
            )

    def figures(checkpoint: Mapping[str, Any]) -> str:
        sigma = checkpoint["singular_values"]
        second, last = (shown(value / sigma[0], 3) for value in (sigma[:2][-1], sigma[-1]))
        return f"sigma_2/sigma_1 {second}, sigma_d/sigma_1 {last}"

    draw = _panel(fill, xlabel="k", ylabel=r"$\sigma_k / \sigma_1$", ylim=(0, 1.05), xlim=(1, None))
    shares = _for_each(checkpoints, figures)
    alt = f"Singular values divided by the largest, over their rank k. {shares}."
    return Picture("singular_values", "Normalised singular values", alt, draw)


def _absolute_spectra(checkpoints: Sequence[Mapping[str, Any]]) -> Picture:
    alone = len(checkpoints) == 1
    random_label = "random table of this shape" if alone else "random tables of these shapes"

    def fill(axes: Any) -> None:
        for index, checkpoint in enumerate(checkpoints):
            _line(axes, index, checkpoint["label"], checkpoint["singular_values"])
            if alone:
                _line(axes, 1, "minus the mean row", checkpoint["centred"]["singular_values"])
        for checkpoint in checkpoints:
            random = checkpoint["random_singular_values"]
            axes.plot(
                range(1, len(random) + 1),
                random,
                label=random_label if checkpoint is checkpoints[0] else None,
                color=INK,
                linewidth=0.9,
                linestyle=":",
            )

    def figures(checkpoint: Mapping[str, Any]) -> str:
        sigma, random = checkpoint["singular_values"], checkpoint["random_singular_values"]
        ends = [shown(value, 3) for value in (sigma[0], sigma[-1], random[0], random[-1])]
        return "from {} to {}, random from {} to {}".format(*ends)

    alt = (
        "Singular values on a logarithmic scale over their rank k, and dotted those of a random "
        f"table of the same shape and row length. {_for_each(checkpoints, figures)}."
    )
    draw = _panel(fill, xlabel="k", ylabel=r"$\sigma_k$", yscale="log", xlim=(1, None))
    return Picture("singular_values_absolute", "Singular values", alt, draw)


def _cosines(checkpoints: Sequence[Mapping[str, Any]]) -> Picture:
    curves = [(checkpoint["label"], checkpoint["cosines"]) for checkpoint in checkpoints]
    if len(checkpoints) == 1:
        curves.append(("minus the mean row", checkpoints[0]["centred"]["cosines"]))

    def fill(axes: Any) -> Dict[str, Any]:
        seen = []
        for index, (label, histogram) in enumerate(curves):
            edges, counts = histogram["edges"], histogram["counts"]
            width, total = edges[1] - edges[0], sum(counts)
            density = [count / total / width for count in counts]
            axes.stairs(density, edges, label=_literal(label), baseline=None, **_curve(index))
            seen += [edge for edge, d in zip(edges, density) if d > 1e-3 * max(density)]
        axes.axvline(0, color=INK, linewidth=0.8)
        return {"xlim": (min([*seen, -0.05]) - 0.03, max([*seen, 0.05]) + 0.05)}

    def figures(checkpoint: Mapping[str, Any]) -> str:
        measures = checkpoint["measures"]
        return (
            f"mean {cosine_shown(measures['mean_cosine'])} "
            f"({cosine_shown(measures['mean_cosine_centred'])} without the mean row), "
            f"{shown(100 * measures['positive_cosines'], 3)} % not negative"
        )

    means = _for_each(checkpoints, figures)
    alt = f"Distribution of the cosine between pairs of different words. {means}."
    draw = _panel(fill, xlabel="cosine between two words", ylabel="density", ylim=(0, None))
    return Picture("cosines", "Cosines between words", alt, draw)


def _norms_by_count(checkpoints: Sequence[Mapping[str, Any]]) -> Picture:
    def fill(axes: Any) -> None:
        for index, checkpoint in enumerate(checkpoints):
            axes.plot(
                checkpoint["counts"]["log_count"],
                checkpoint["counts"]["norm"],
                "o^sDv<>"[index],
                color=COLOURS[index],
                markersize=2.5,
                linestyle="none",
                alpha=0.7,
                label=_literal(checkpoint["label"]),
                rasterized=True,  # thousands of marks would make the SVG heavy
            )

    def figures(checkpoint: Mapping[str, Any]) -> str:
        keys = ("norm_count_slope", "norm_count_pearson")
        return "slope {}, correlation {}".format(
            *(shown(checkpoint["measures"][key], 3) for key in keys)
        )

    alt = (
        "Length of word vectors over the logarithm of the word's count, for up to 1,000 words "
        "evenly spaced in log rank; the figures are over all words. "
        f"{_for_each(checkpoints, figures)}."
    )
    draw = _panel(fill, xlabel="smoothed log count", ylabel=r"$\|w\|$", ylim=(0, None))
    return Picture("norms_by_count", "Row norms by log count", alt, draw)


def _layers(checkpoints: Sequence[Mapping[str, Any]]) -> Picture:
    panels = (
        ("mean_cosine", "mean cosine"),
        ("sequence_cosine", "within a sequence"),
        ("isoscore", "IsoScore"),
    )

    def draw(pyplot: Any) -> Any:
        figure, grid = pyplot.subplots(3, 1, figsize=(SIZE[0], 7.6), sharex=True)
        for axes, (key, title) in zip(grid, panels):
            for index, checkpoint in enumerate(checkpoints):
                values = [layer[key] for layer in checkpoint["outputs"]["layers"]]
                style = _curve(index)
                axes.plot(
                    values, marker="o", markersize=4, label=_literal(checkpoint["label"]), **style
                )
            axes.set(ylabel=title)
        grid[-1].xaxis.get_major_locator().set_params(integer=True)
        grid[-1].set(xlabel="layer")
        _legend(grid[-1], below=0.32)
        return figure

    def figures(checkpoint: Mapping[str, Any]) -> str:
        layers = checkpoint["outputs"]["layers"]
        ends = (cosine_shown(layer["mean_cosine"]) for layer in (layers[0], layers[-1]))
        return "mean cosine from {} to {}".format(*ends)

    alt = (
        "Mean cosine, over all and within a sequence, and IsoScore of the decoder's hidden states, "
        "layer by layer from the embeddings to the input of the output layer. "
        f"{_for_each(checkpoints, figures)}."
    )
    return Picture("layers", "Hidden states by layer", alt, draw)


def _projections(
    kind: str, checkpoints: Sequence[Mapping[str, Any]], analysed: Sequence[Analysed]
) -> Picture:
    columns = min(len(checkpoints), 2)  # so that a phone shows the words
    lines = -(-len(checkpoints) // columns)
    places = _ordered_by(checkpoints)
    direction = {"svd": "singular direction", "pca": "principal component"}[kind]

    def draw(pyplot: Any) -> Any:
        figure, grid = pyplot.subplots(
            lines,
            columns,
            squeeze=False,
            figsize=(4.3 * columns + 0.8, 4.0 * lines),
            layout="constrained",
        )
        for axes in grid.flat[len(checkpoints) :]:
            axes.remove()
        colours = _word_colours()
        last = max(int(checkpoint.measured.projection_rank.max()) for checkpoint in analysed)
        drawn = None
        for axes, checkpoint, analysed_model in zip(grid.flat, checkpoints, analysed):
            drawn = _scatter(axes, analysed_model, colours, last)
            axes.set(title=_literal(checkpoint["label"]), xlabel=f"{direction} 1")
        for axes in grid[:, 0]:
            axes.set_ylabel(f"{direction} 2")
        bar = figure.colorbar(drawn, ax=list(grid.flat[: len(checkpoints)]), shrink=0.8)
        ticks = [10**power for power in range(10) if 10**power < last / 2] + [last]
        bar.set_ticks(ticks, labels=[f"{tick:,}" for tick in ticks])
        bar.set_label(places)
        return figure

    how = {
        "svd": "the first two right singular vectors",
        "pca": "the first two principal components",
    }[kind]
    centres = "; ".join(
        f"{checkpoint['label']}: centre at {_centre(analysed_model)}"
        for checkpoint, analysed_model in zip(checkpoints, analysed)
    )
    scale = ", each model on a scale of its own" if len(checkpoints) > 1 else ""
    alt = (
        f"Words projected on {how}{scale}, coloured by {places}; a cross marks the origin. "
        f"{centres}."
    )
    return Picture("projection", "Words in two dimensions", alt, draw)


def _scatter(axes: Any, analysed_model: Analysed, colours: Any, last: int) -> Any:
    """Draw the words of one model and the origin; return the marks, for a colour bar.

    Args:
        axes: of the model.
        analysed_model: with the points.
        colours: from frequent words to rare ones.
        last: the rank at their end.
    """
    points, ranks = analysed_model.measured.projection, analysed_model.measured.projection_rank
    # Each on a scale of its own: tables of other models differ by orders of magnitude.
    limit = 1.05 * float(points.abs().max()) or 1.0
    # Frequent words are few, so they are drawn last, above the others.
    order = ranks.argsort(descending=True)
    x, y = points[order].t().tolist()
    drawn = axes.scatter(
        x,
        y,
        c=ranks[order].tolist(),
        cmap=colours,
        s=7,
        linewidths=0,
        rasterized=True,  # thousands of marks would make the SVG heavy
        norm=_rank_scale(last),
    )
    for size, colour in ((5, GROUND), (2, ORIGIN)):
        axes.plot(0, 0, "+", color=colour, markersize=14, markeredgewidth=size)
    axes.set(aspect="equal", xlim=(-limit, limit), ylim=(-limit, limit))
    return drawn


def _rank_scale(last: int) -> Any:
    """Ranks from 1 to ``last`` on 0 to 1.

    Nine words in ten have a rank within a factor of ten of the last, where a logarithm sees one
    colour, and the few frequent words differ by orders of magnitude, where a linear scale does:
    a power shows both.
    """
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.4, vmin=1, vmax=max(last, 2))


def _word_colours() -> Any:
    """cividis, which the colour-blind read as others do, without its end next to the ground."""
    import_matplotlib()
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    # From light, for frequent words, to dark.
    return ListedColormap([colormaps["cividis"](0.85 - 0.85 * k / 255) for k in range(256)])


def _centre(analysed_model: Analysed) -> str:
    """The mean of the words, of which less than a thousandth of the panel is zero."""
    least = 1e-3 * float(analysed_model.measured.projection.abs().max())
    x, y = (
        value if abs(value) >= least else 0.0
        for value in analysed_model.measured.projection.mean(0).tolist()
    )
    return f"({shown(x, 3)}, {shown(y, 3)})"


def log_probability_spectra(checkpoints: Sequence[Mapping[str, Any]]) -> Picture:
    """The singular values of the log-probabilities of several models, as shares below a bound."""

    def fill(axes: Any) -> None:
        for index, checkpoint in enumerate(checkpoints):
            axes.plot(
                checkpoint["outputs"]["points"],
                [100 * share for share in checkpoint["outputs"]["cumulative_share"]],
                label=_literal(checkpoint["label"]),
                **_curve(index),
            )
        for index, checkpoint in enumerate(checkpoints):
            axes.axvline(checkpoint["outputs"]["threshold"], color=COLOURS[index], linewidth=0.8)

    def figures(checkpoint: Mapping[str, Any]) -> str:
        least = min(checkpoint["outputs"]["tokens"], checkpoint["outputs"]["words"])
        return f"rank {shown(checkpoint['measures'].get('log_probability_rank'), 6)} of {least}"

    alt = (
        "Share of singular values below a multiple of the largest, for the matrix of "
        "log-probabilities; thin vertical lines mark the threshold of the rank. "
        f"{_for_each(checkpoints, figures)}."
    )
    draw = _panel(
        fill,
        xscale="log",
        xlabel=r"$\sigma / \sigma_1$ of the log-probability matrix",
        ylabel="singular values below, %",
        ylim=(0, 102),
    )
    return Picture("log_probabilities", "Singular values of the log-probability matrix", alt, draw)


def _history(checkpoints: Sequence[Mapping[str, Any]]) -> Picture:
    titles = {measure.key: measure.title for measure in ALL}

    def draw(pyplot: Any) -> Any:
        figure, grid = pyplot.subplots(2, 3, figsize=(10, 5.4), layout="constrained", sharex=True)
        updates = [checkpoint["progress"]["updates"] for checkpoint in checkpoints]
        for axes, key in zip(grid.flat, HISTORY):
            values = [checkpoint["measures"].get(key) for checkpoint in checkpoints]
            axes.plot(
                updates,
                [float("nan") if v is None else v for v in values],
                marker="o",
                markersize=4,
                **_curve(0),
            )
            axes.set(title=titles[key])
        for axes in grid[-1]:
            axes.set(xlabel="updates")
        return figure

    first, last = checkpoints[0], checkpoints[-1]
    changes = "; ".join(
        f"{titles[key]} from {shown(first['measures'].get(key), 3)} to "
        f"{shown(last['measures'].get(key), 3)}"
        for key in HISTORY
    )
    alt = f"Measures over the updates of one run, {first['label']} to {last['label']}: {changes}."
    return Picture("history", "One run over its checkpoints", alt, draw)
