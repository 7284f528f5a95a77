"""The non-monotonic criterion (algorithm 1), which detects that the loss has stopped improving."""

from __future__ import annotations

import math
from typing import List

from spectral_fairseq.errors import check_range


class NonMonotonicTrigger:
    """Fires when the loss exceeds the lowest loss from more than ``interval`` checks ago.

    With v_1, v_2, ... the losses and n the interval, check t fires if t - 1 > n and
    v_t > min(v_1, ..., v_{t-1-n}). The last n losses before v_t are left out, so that noise of a
    few checks does not fire it. A loss that is not a number counts as infinite.

    Args:
        interval: n, in checks (epochs, if the loss is computed once in each epoch); 5 in the paper.

    Raises:
        ConfigurationError: the interval is negative.
    """

    def __init__(self, interval: int = 5) -> None:
        check_range("`interval`", interval, at_least=0, whole=True)
        self.interval = interval
        self.history: List[float] = []

    @property
    def reference(self) -> float:
        """The loss that the next loss must exceed to fire; infinite while there is none."""
        return min(self.history[: max(0, len(self.history) - self.interval)], default=math.inf)

    def check(self, loss: float) -> bool:
        """Record the next loss and return whether the criterion fires."""
        loss = math.inf if math.isnan(loss) else float(loss)
        fires = loss > self.reference
        self.history.append(loss)
        return fires

    def restart(self) -> None:
        """Forget all losses."""
        self.history = []
