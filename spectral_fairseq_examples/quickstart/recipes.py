"""The two recipes, which differ in two flags."""

from __future__ import annotations

from typing import Dict, Tuple

# recipe -> (label, flags in which the recipes differ)
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

# The whole job takes at most 15 minutes on two CPU cores, and less on a GPU. Both recipes train for
# the same number of updates, because their tables are compared after equal work.
UPDATES = {"cpu": 2000, "cuda": 8000}
