"""The lengths of the segments through which gradients are propagated back in time (BPTT).

Merity, Keskar, Socher: "Regularizing and Optimizing LSTM Language Models", ICLR 2018, section
4.1, https://arxiv.org/abs/1708.02182. A new length for every update lets each token's gradient
reach back over a different distance in each epoch.
"""

from __future__ import annotations

from typing import Callable, List

import numpy as np

SHORTEST = 5
FULL_LENGTH_PROBABILITY = 0.95
STANDARD_DEVIATION = 5.0


def fixed_lengths(total: int, length: int) -> List[int]:
    """Lengths of a stream's segments, which sum to ``total``; all but the last are ``length``."""
    return _cut(total, min(length, SHORTEST), lambda: length)


def sampled_lengths(total: int, length: int, generator: np.random.Generator) -> List[int]:
    """Cut a stream into segments whose length is drawn for each of them.

    ``max(5, floor(x))`` with ``x ~ N(b, 5^2)``, where ``b`` is ``length`` with probability 0.95
    and half of it otherwise.

    Returns:
        Lengths that sum to ``total``, the tokens of the stream.
    """

    def draw() -> int:
        base = length if generator.random() < FULL_LENGTH_PROBABILITY else length / 2
        return max(SHORTEST, int(generator.normal(base, STANDARD_DEVIATION)))

    return _cut(total, SHORTEST, draw)


def _cut(total: int, shortest: int, draw: Callable[[], int]) -> List[int]:
    # A remainder below `shortest` joins the segment before it: an update from one or two tokens
    # would be noise, and streams that are one token shorter than others would have no token in it.
    lengths = []
    left = total
    while left > 0:
        length = min(draw(), left)
        if left - length < max(2, shortest):
            length = left
        lengths.append(length)
        left -= length
    return lengths
