"""The figures of both recipes as a table and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Sequence

import torch

from spectral_fairseq.files import replacing
from studies.text_tables import text_table

# Okabe and Ito's blue and vermilion, which also differ in lightness, and two line styles.
STYLES = {
    "plain": {"color": "#D55E00", "linestyle": "--"},
    "spectrum_control": {"color": "#0072B2", "linestyle": "-"},
}


def format_table(results: Dict[str, Dict[str, Any]], labels: Sequence[str], on_gpu: bool) -> str:
    """The figures of the recipes side by side, as text."""
    isotropy = "isotropy_as_is"
    rows = [
        ("sacreBLEU (up is better)", lambda r: f"{r['bleu']:.1f}"),
        ("chrF (up is better)", lambda r: f"{r['chrf']:.1f}"),
        ("validation perplexity", lambda r: f"{r['valid_ppl']:.2f}"),
        ("I1, both signs (1 = isotropic)", lambda r: f"{r[isotropy]['I1_both_signs']:.4f}"),
        ("I2, both signs (0 = isotropic)", lambda r: f"{r[isotropy]['I2_both_signs']:.4f}"),
        ("sigma_d / sigma_1", lambda r: f"{r['sigma_last_to_first']:.4f}"),
        ("mean cosine", lambda r: f"{r['mean_cosine']:.4f}"),
        ("time per update", lambda r: f"{1000 * r['seconds_per_update']:.0f} ms"),
        (
            f"peak memory of the {'GPU' if on_gpu else 'process'}",
            lambda r: f"{r['peak_bytes'] / 2**20:.0f} MiB" if "peak_bytes" in r else "unknown",
        ),
    ]
    cells = [[name, *map(show, results.values())] for name, show in rows]
    return text_table(cells, ["", *labels]) + "\n"


def draw_spectra(results: Dict[str, Dict[str, Any]], labels: Dict[str, str], folder: Path) -> None:
    """Draw sigma_k / sigma_1 of each table and the prior into ``spectra.png`` and ``.svg``."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "spectra"  # the same figures give the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(3.9, 3.2), constrained_layout=True)
    for recipe, figures in results.items():
        sigma = torch.tensor(figures["singular_values"])
        k = range(1, len(sigma) + 1)
        axes.plot(
            k,
            (sigma / sigma[0]).tolist(),
            linewidth=2,
            label=labels[recipe],
            **STYLES[recipe],  # type: ignore[arg-type]
        )
    for prior in (figures["prior"] for figures in results.values() if "prior" in figures):
        axes.plot(
            range(1, len(prior) + 1),
            [value / prior[0] for value in prior],
            color="black",
            linestyle=":",
            linewidth=1.5,
            label="prior of spectrum control",
            zorder=3,
        )
    axes.set_xlabel("k, from the largest singular value on", fontsize=9)
    axes.set_ylabel(r"$\sigma_k\,/\,\sigma_1$", fontsize=9)
    axes.set_title("Embedding table after training", fontsize=10)
    axes.tick_params(labelsize=9)
    axes.set_xlim(1, max(len(figures["singular_values"]) for figures in results.values()))
    axes.set_ylim(0, 1.05)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="center right", bbox_to_anchor=(1, 0.7))
    for suffix in ("png", "svg"):
        # Without a date the same figures give the same file.
        metadata = {"Date": None} if suffix == "svg" else None
        with replacing(folder / f"spectra.{suffix}") as partial:
            figure.savefig(partial, format=suffix, dpi=200, metadata=metadata)
    pyplot.close(figure)
