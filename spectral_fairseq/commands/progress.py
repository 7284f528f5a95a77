"""Progress bars on stderr, shown on terminals only."""

from __future__ import annotations

import sys
from typing import Any, Callable

from spectral_fairseq.analysis.options import SHARES, StepCallback
from spectral_fairseq.errors import printable


def _bar(hidden: bool, **settings: Any) -> Any:
    from tqdm import tqdm

    disable = True if hidden else None  # None: off where stderr is no terminal
    return tqdm(disable=disable, file=sys.stderr, leave=False, **settings)


class StageBars:
    """One bar for each stage of an evaluation, with the time left in it."""

    def __init__(self, hidden: bool) -> None:
        self._hidden = hidden
        self._bar: Any = None

    def __enter__(self) -> StageBars:
        return self

    def __exit__(self, *unused: Any) -> None:
        if self._bar is not None:
            self._bar.close()

    def begin(self, stage: str, tokens: int) -> Callable[[int], Any]:
        """Start the bar of a stage; the result counts its tokens."""
        self.__exit__()
        self._bar = _bar(
            self._hidden, total=tokens, unit="tok", unit_scale=True, desc=printable(stage)
        )
        return self._bar.update


def checkpoints_bar(hidden: bool, total: float) -> Any:
    """One bar over the steps of several checkpoints."""
    form = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    return _bar(hidden, total=total, dynamic_ncols=True, bar_format=form)


class CheckpointBar(StepCallback):
    """One checkpoint's part of :func:`checkpoints_bar`."""

    def __init__(self, bar: Any, label: str) -> None:
        self._bar = bar
        self._label = label
        self._per_unit = self._left = 0.0

    def begin(self, step: str, units: float = 1) -> None:
        """Complete the step before, and show this one's name."""
        self.end()
        self._bar.set_description_str(printable(f"{self._label}: {step}"))
        self._left = SHARES[step]
        self._per_unit = self._left / max(units, 1)

    def advance(self, units: float) -> None:
        """Move the bar by the share that these parts have in the time."""
        done = min(units * self._per_unit, self._left)
        self._left -= done
        self._bar.update(done)

    def end(self) -> None:
        """Complete the last step."""
        self._bar.update(self._left)
        self._left = 0.0
