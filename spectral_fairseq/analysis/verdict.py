"""What stands out in one table, by bounds that compare it with a random one.

Note [Bounds of the verdict]
----------------------------
Every bound compares the table with a random one of the same shape (``random_spectrum.py``) or
says a fact about the table itself; none is taken from other models.

* The words *share a direction* if the mean row holds a larger part of the squared length of the
  table than any direction of a random table does, (1 + sqrt(d / N))^2 / d of it, which is the edge
  of Marchenko and Pastur. Below that, the mean could be one of many equal directions. The mean
  cosine is that part for rows of equal length, so it has the same bound.
* They lie in a *narrow cone* if either is more than half: what all words have in common is then
  longer than what tells them apart.
* Apart from the mean, *one direction stands out* if the largest singular value of the centred table
  is twice the edge, and the directions are not few. What it holds is named from ``BEYOND`` edges
  on, which chance does not reach. Rows of different lengths alone can put it between the two.
* *One row* stands out if it makes up half or more of such a direction and is twice as long as any
  other, each minus the mean row (``analysis/measures.py``).
* Apart from the mean, *few directions* carry the table if the effective rank of the centred table
  is below half of the random table's, as if half of the dimensions or more were missing.
"""

from __future__ import annotations

import enum
import math
from typing import Any, Mapping, NamedTuple

from spectral_fairseq.analysis.measures import BEYOND

NARROW = 0.5
FEW_DIRECTIONS = 0.5
STANDS_OUT = 2.0


class Finding(enum.Enum):
    """What stands out most in a table; ``wording.py`` has the sentence for each."""

    NARROW_CONE = enum.auto()
    COMMON_DIRECTION = enum.auto()
    LONG_ROW = enum.auto()
    ONE_DIRECTION = enum.auto()
    FEW_DIRECTIONS = enum.auto()
    NO_MEAN = enum.auto()
    EVEN = enum.auto()


class Findings(NamedTuple):
    """What stands out in one table.

    Attributes:
        shared: whether the words share a direction.
        few: whether few directions carry the table apart from the mean.
        edges: the largest singular value of the centred table over the edge of a random one; 0 for
            a table of equal rows, which has nothing but its mean.
        finding: the first of what stands out.
    """

    shared: bool
    few: bool
    edges: float
    finding: Finding


def findings_of(checkpoint: Mapping[str, Any]) -> Findings:
    """What stands out in one table of the document: Note [Bounds of the verdict]."""
    measures, random = checkpoint["measures"], checkpoint["random"]
    words, dim = checkpoint["table"]["words"], checkpoint["table"]["dimensions"]
    common = max(measures["mean_share"] ** 2, measures["mean_cosine"])
    narrow = common >= NARROW
    # With one or two dimensions a narrow cone can lie below the second bound.
    shared = narrow or common > (1 + math.sqrt(dim / words)) ** 2 / dim
    few = measures["effective_rank_centred"] < FEW_DIRECTIONS * random["effective_rank_centred"]
    edges = measures["sigma_over_edge_centred"] or 0.0
    if shared:
        finding = Finding.NARROW_CONE if narrow else Finding.COMMON_DIRECTION
    elif checkpoint["dominant_row"] is not None:
        finding = Finding.LONG_ROW
    elif edges >= STANDS_OUT and not few:
        finding = Finding.ONE_DIRECTION
    elif few:
        finding = Finding.FEW_DIRECTIONS
    else:
        finding = Finding.NO_MEAN if edges >= BEYOND else Finding.EVEN
    return Findings(shared, few, edges, finding)
