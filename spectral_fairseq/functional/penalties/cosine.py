"""The mean cosine between different words, and its penalty.

Gao, He, Tan, Qin, Wang, Liu: "Representation Degeneration Problem in Training Natural Language
Generation Models", ICLR 2019, https://openreview.net/forum?id=SkEYojRqtm, equation 6 and
appendix B:

    R = 1/N^2 sum_i sum_{j != i} w_i'w_j / (||w_i|| ||w_j||) = (||sum_i w_i/||w_i|| ||^2 - N) / N^2
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.linalg.full_float32 import full_float32
from spectral_fairseq.functional.linalg.row_norms import SMALLEST_NORM


class _SquaredDirectionSum(torch.autograd.Function):
    """S = ||sum_i w_i/||w_i|| ||^2 - sum_i ||w_i/||w_i|| ||^2, over the rows that are not excluded.

    With s = sum_i w_i/||w_i|| the gradient is closed, dS/dw_i = 2 (s - w_i (w_i's)/||w_i||^2) /
    ||w_i||. Each pass reads the table twice, and the gradient is the only tensor of the table's
    size: autograd's own rules would make five.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, excluded: Optional[Tensor]) -> Tensor:
        norms = torch.linalg.vector_norm(matrix, dim=1)  # [n]
        inverse = torch.where(norms > SMALLEST_NORM, norms, torch.full_like(norms, float("inf")))
        inverse.reciprocal_()
        if excluded is not None:
            inverse.index_fill_(0, excluded, 0)
        with full_float32(matrix.device):
            direction_sum = torch.mv(matrix.t(), inverse)  # [d]
        ctx.save_for_backward(matrix, inverse, direction_sum)
        return direction_sum.square().sum() - (inverse > 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:
        matrix, inverse, direction_sum = ctx.saved_tensors
        along = torch.mv(matrix, direction_sum) * inverse  # [n], cosines times ||s||
        result = matrix * (-2 * grad * along * inverse.square()).unsqueeze(1)  # [n, d]
        return result.addr_(inverse, 2 * grad * direction_sum), None


def cosine_penalty(matrix: Tensor, excluded: Optional[Tensor] = None) -> Tensor:
    """Return R of equation 6, in time O(N d).

    R does not depend on the lengths of the rows. A zero row has no direction: its cosines are taken
    as zero, its gradient is zero, and it still counts in N.

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
    if count < 1:
        raise ConfigurationError(
            "a table with at least one row that is not excluded, for the cosine penalty",
            f"{matrix.size(0)} rows, all of them padding or made-up words",
            "Check the dictionary.",
        )
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    return _SquaredDirectionSum.apply(wide, excluded) / count**2
