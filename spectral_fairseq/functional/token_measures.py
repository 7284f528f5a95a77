"""What a softmax tells of each token beside its loss: log-probability, entropy, right or wrong.

With scores s of N words, p = softmax(s) and a target y,

    log p_y = s_y - log Z,    H = -sum_v p_v log p_v = log Z - sum_v p_v s_v,    s_y = max_v s_v,

they follow from the scores of a block while these are there, in float32, so no pass has to hold
tokens x N for them. Trainers log the mean entropy and the accuracy, and the losses of reinforcement
learning are functions of log p_y (GRPO, https://arxiv.org/abs/2402.03300).
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

# Number of scores in the cache of a core, 512 KiB of float32.
CACHED_SCORES = 128 * 1024


class TokenMeasures(NamedTuple):
    """Of each token, zero where the target is ignored.

    Attributes:
        log_probs: log p_y in nats, float32 or wider.
        entropy: H in nats, likewise, without a gradient.
        correct: whether no word has a higher score than the target, bool.
    """

    log_probs: Tensor
    entropy: Tensor
    correct: Tensor

    @classmethod
    def at(
        cls,
        kept: Optional[Tensor],
        shape: torch.Size,
        log_probs: Tensor,
        entropy: Tensor,
        right: Tensor,
    ) -> TokenMeasures:
        """Those of some tokens among all, from tensors of shape (n,).

        Args:
            kept: indices of the tokens, shape (n,); ``None`` for all.
            shape: (T,), of all tokens.
            log_probs: of the tokens.
            entropy: likewise.
            right: 1 for a token that is right, 0 for others.
        """
        found = [log_probs, entropy, right]
        if kept is not None:
            found = [one.new_zeros(shape).index_copy(0, kept, one) for one in found]
        return cls(found[0], found[1], found[2] > 0)


def rows_in_cache(scores: Tensor) -> int:
    """How many rows of scores, shape (r, N), are computed at a time; a GPU takes all of them."""
    if scores.device.type != "cpu":
        return max(1, len(scores))
    return max(1, CACHED_SCORES * torch.get_num_threads() // scores.size(1))


def measured_softmax_(scores: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Overwrite ``scores``, shape (r, N), by their softmax, and measure them in the same pass.

    The measures cost three passes over the scores beside those of the softmax, in the cache: their
    distances from the highest one, the products of these with p, and the sum. The highest score and
    log Z are found by the softmax anyway.

    Returns:
        log Z, the highest score, and H, shape (r,) each.
    """
    few = rows_in_cache(scores)
    below = scores.new_empty((min(few, len(scores)), scores.size(1)))
    found: List[Tuple[Tensor, Tensor, Tensor]] = []
    for part in scores.split(few):
        top = part.amax(-1)
        distances = torch.sub(part, top.unsqueeze(1), out=below[: len(part)])
        torch.softmax(part, -1, out=part)
        log_sum = part.amax(-1).log_().neg_()  # log Z - top
        # A score of -inf gives 0 times infinity, which counts as 0; where a score is no number,
        # neither is log Z.
        found.append((top + log_sum, top, log_sum - distances.mul_(part).nansum(-1)))
    log_z, tops, entropy = map(torch.cat, zip(*found))
    return log_z, tops, entropy
