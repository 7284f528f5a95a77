"""``--ignore-prefix-size``, under which a batch of short sentences has no loss."""

from __future__ import annotations

import logging
from typing import Any

from spectral_fairseq.errors import ConfigurationError

logger = logging.getLogger(__name__)


class IgnoredPrefix:
    """Says once that a whole batch lies within the ignored prefix, which fairseq keeps silent.

    Args:
        size: tokens at the start of each sentence that the loss leaves out.

    Raises:
        ConfigurationError: fewer than 0, which would leave out the other end.
    """

    def __init__(self, size: int) -> None:
        if size < 0:
            raise ConfigurationError(
                "--ignore-prefix-size of 0 or more", str(size), "Give a number of tokens."
            )
        self.size = size
        self._said = False

    def look_at(self, sample: Any) -> None:
        """Warn, the first time, if no target of a batch counts."""
        length = sample["target"].size(-1)
        if self.size and length <= self.size and not self._said:
            self._said = True
            logger.warning(
                f"the loss of a batch is 0, because its sentences have at most {length} tokens and "
                f"--ignore-prefix-size is {self.size}"
            )
