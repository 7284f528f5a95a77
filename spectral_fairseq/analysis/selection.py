"""Which of many checkpoints a report shows, and whether they follow one run."""

from __future__ import annotations

import os
from typing import Any, List, Mapping, Sequence

# Of more checkpoints, such as the epochs of a run, some are described, evenly spaced.
MOST_VERDICTS = 3


def spread(items: Sequence[Any], most: int) -> List[Any]:
    """At most ``most`` of the items, the first and the last among them, evenly spaced."""
    if len(items) <= most:
        return list(items)
    return [items[round(at * (len(items) - 1) / (most - 1))] for at in range(most)]


def follows_one_run(checkpoints: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there are three checkpoints or more of one run, of increasing numbers of updates.

    fairseq and transformers' Trainer save a run into a folder of its own, under names that begin
    with ``checkpoint``; the best checkpoints of several runs are in several folders.
    """
    updates = [checkpoint["progress"]["updates"] for checkpoint in checkpoints]
    paths = [checkpoint["path"] for checkpoint in checkpoints]
    if len(updates) < 3 or None in [*updates, *paths] or updates != sorted(set(updates)):
        return False
    places = [os.path.split(os.path.abspath(path)) for path in paths]
    in_one_folder = len({folder for folder, _ in places}) == 1
    return in_one_folder and all(name.startswith("checkpoint") for _, name in places)
