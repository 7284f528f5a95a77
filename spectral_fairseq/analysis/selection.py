"""Which of many checkpoints a report shows, and whether they follow one run."""

from __future__ import annotations

from typing import Any, List, Mapping, Sequence

# Of more checkpoints, such as the epochs of a run, some are described, evenly spaced.
MOST_VERDICTS = 3


def spread(items: Sequence[Any], most: int) -> List[Any]:
    """At most ``most`` of the items, the first and the last among them, evenly spaced."""
    if len(items) <= most:
        return list(items)
    return [items[round(at * (len(items) - 1) / (most - 1))] for at in range(most)]


def follows_one_run(checkpoints: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there are three checkpoints or more, of increasing numbers of updates."""
    updates = [checkpoint["progress"]["updates"] for checkpoint in checkpoints]
    return len(updates) > 2 and None not in updates and updates == sorted(set(updates))
