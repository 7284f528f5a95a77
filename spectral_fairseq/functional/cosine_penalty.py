"""The cosine penalty: the mean cosine between different words.

Gao, He, Tan, Qin, Wang, Liu: "Representation Degeneration Problem in Training Natural Language
Generation Models", ICLR 2019, https://openreview.net/forum?id=SkEYojRqtm, equation 6 and
appendix B:

    R = 1/N^2 sum_i sum_{j != i} w_i'w_j / (||w_i|| ||w_j||) = (||sum_i w_i/||w_i|| ||^2 - N) / N^2

Flags: ``--cosreg-weight`` 0.
In order: ``methods/penalties.py: weight_and_excluded``, ``cosine_penalty``.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError, check_enough
from spectral_fairseq.functional.autograd import check_untransformed, differentiable_once
from spectral_fairseq.functional.precision import full_float32, widened
from spectral_fairseq.functional.row_norms import exact_norms


class _SquaredDirectionSum(torch.autograd.Function):
    """S = ||sum_i w_i/||w_i|| ||^2 - sum_i ||w_i/||w_i|| ||^2, over the rows that are not excluded.

    With s = sum_i w_i/||w_i|| the gradient is closed, dS/dw_i = 2 (s - w_i (w_i's)/||w_i||^2) /
    ||w_i||. Each pass reads the table twice, and the gradient is the only tensor of the table's
    size: autograd's own rules would make five.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, excluded: Optional[Tensor]) -> Tensor:
        norms = exact_norms(matrix)  # [n]
        tiny = torch.finfo(matrix.dtype).tiny  # 1/||w_i|| is infinite for shorter rows
        inverse = torch.where(norms >= tiny, norms, torch.full_like(norms, float("inf")))
        inverse.reciprocal_()
        if excluded is not None:
            inverse.index_fill_(0, excluded, 0)
        with full_float32(matrix.device):
            direction_sum = torch.mv(matrix.t(), inverse)  # [d]
        ctx.save_for_backward(matrix, inverse, direction_sum)
        return direction_sum.square().sum() - (inverse > 0).sum()

    @staticmethod
    @differentiable_once("cosine_penalty")
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:
        matrix, inverse, direction_sum = ctx.saved_tensors
        with torch.autocast(matrix.device.type, enabled=False):  # a loop may call backward in it
            along = torch.mv(matrix, direction_sum) * inverse  # [n], cosines times ||s||
        # One factor after the other: the square of the inverse of a short row is infinite.
        result = matrix * inverse.unsqueeze(1)  # [n, d]
        result.mul_((-2 * grad * along * inverse).unsqueeze(1))
        return result.addr_(inverse, 2 * grad * direction_sum), None


def cosine_penalty(matrix: Tensor, excluded: Optional[Tensor] = None) -> Tensor:
    """Return R of equation 6, in time O(N d).

    R does not depend on the lengths of the rows; the gradient grows with their inverse. A zero row
    has no direction, nor has one of less than the smallest normal number: its cosines are taken as
    zero, its gradient is zero, and it still counts in N.

    Args:
        matrix: table, shape (n, d), of any floating dtype.
        excluded: distinct indices of the rows to leave out (padding and the like), shape (m,);
            N = n - m.

    Returns:
        Scalar between -1/N and 1 - 1/N, in float32 or wider.

    Raises:
        ConfigurationError: every row is excluded.
    """
    count = matrix.size(0) - (0 if excluded is None else excluded.numel())
    what = "row that is neither padding nor a made-up word, for the cosine penalty"
    check_enough(count, 1, what, "Check the dictionary.", ConfigurationError)
    check_untransformed()
    return _SquaredDirectionSum.apply(widened(matrix), excluded) / count**2
