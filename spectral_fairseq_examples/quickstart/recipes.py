"""The two recipes, which differ in two flags."""

from __future__ import annotations

from typing import Dict, Tuple

# recipe -> (label, the flags in which it differs)
RECIPES: Dict[str, Tuple[str, Tuple[str, ...]]] = {
    "plain": (
        "plain",
        ("--arch", "transformer", "--criterion", "label_smoothed_cross_entropy"),
    ),
    "spectrum_control": (
        "spectrum control",
        ("--arch", "transformer_sc", "--criterion", "spectrum_control"),
    ),
}

# Chosen so that the whole job takes at most 15 minutes on two CPU cores; a GPU gets through more
# in less. One number for both recipes: their tables are compared after equal work.
UPDATES = {"cpu": 2000, "cuda": 8000}
