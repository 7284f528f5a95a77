"""How often the penalties on whole tables are computed.

Note [Lazy penalties]
---------------------
A penalty on a whole table costs the same whatever the batch: at N = 267,735 and d = 410 the N d^2
products of U'U, forward and again backward, are about a quarter of the softmax of 1,024 tokens,
and a gradient of N d numbers alone is 2 % of such a step. A table moves by far less than its own
size in a few updates, so for large N these penalties are computed every k-th update with k times
their weight: the gradient summed over k updates stays the same to first order. In between, the
logs show what was computed last: fairseq would show "None" for a key without a value.
"""

from __future__ import annotations

from typing import Optional

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.plugin.flags import Flag

LARGE_DICTIONARY = 65536
WORDS_PER_INTERVAL_STEP = 16384


def parse_interval(text: str) -> Optional[int]:
    """The number of updates that ``text`` says, ``None`` for ``auto``.

    Raises:
        ConfigurationError: ``text`` is neither ``auto`` nor a whole number from 1.
    """
    if text == "auto":
        return None
    if not str(text).isdigit() or int(text) < 1:
        raise ConfigurationError(
            "`value` to be 'auto' or a whole number >= 1", repr(text), "Correct it."
        )
    return int(text)


def interval_for(num_words: int) -> int:
    """The automatic ``--penalty-interval`` for a dictionary of ``num_words``."""
    return 1 if num_words < LARGE_DICTIONARY else num_words // WORDS_PER_INTERVAL_STEP


PENALTY_INTERVAL = Flag(
    "penalty_interval",
    "auto",
    "compute the penalties on whole tables every k-th update, k times as strong; 'auto' is 1 up "
    "to 65,535 words and grows with the dictionary",
    parse_interval,
)
