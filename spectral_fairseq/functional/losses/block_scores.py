"""Scores of a block of tokens, their softmax, and the dtypes in which both are computed."""

from __future__ import annotations

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.linalg.products import has_wide_products, matmul_transposed
from spectral_fairseq.functional.losses.token_blocks import filled

# 16 bytes of 16-bit numbers.
ALIGNED_COLUMNS = 8


def product_dtype(contexts: Tensor, matrix: Tensor, bounded: bool = True) -> torch.dtype:
    """Return the dtype in which the products of a block are computed.

    It is that of the inputs, or of autocast where autocast is on; but float32 instead of float16
    where the results would be float16 too, whose range does not hold scores of 1e5.

    Args:
        contexts: h.
        matrix: W.
        bounded: whether no gradient of a score is above 1, as ``gradient_sums.py``, Note [Half
            precision] needs it in float16.
    """
    common = torch.promote_types(contexts.dtype, matrix.dtype)
    # A product of two scalars shows what autocast does, for every device and version of torch.
    probe = contexts.new_zeros(1, 1, dtype=common)
    dtype = torch.mm(probe, probe).dtype
    if dtype == torch.float16 and not (bounded and has_wide_products(dtype, contexts.device)):
        return torch.float32
    return dtype


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and of all that is not a product: float64 or float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_sizes(contexts: Tensor, targets: Tensor, matrix: Tensor, bias: Optional[Tensor]) -> None:
    """Refuse tensors whose shapes do not fit together.

    Args:
        contexts: h, shape (T, *, d).
        targets: shape (T,).
        matrix: W, shape (N, d).
        bias: b, shape (N,).

    Raises:
        ConfigurationError: it names the shapes.
    """
    vocabulary, dim = matrix.shape
    if contexts.size(-1) != dim:
        raise ConfigurationError(
            f"`contexts` of d = {dim} dimensions, like those of the table",
            f"shape {tuple(contexts.shape)}",
            "Give the output layer a table of its context dimension.",
        )
    if targets.dim() != 1 or targets.size(0) != contexts.size(0):
        raise ConfigurationError(
            f"one target for each of {contexts.size(0)} contexts",
            f"`targets` of shape {tuple(targets.shape)}",
            "Flatten contexts and targets alike.",
        )
    if bias is not None and bias.shape != (vocabulary,):
        raise ConfigurationError(
            f"a `bias` of shape ({vocabulary},)",
            str(tuple(bias.shape)),
            "Give one value for each word.",
        )


def aligned(contexts: Tensor, matrix: Tensor) -> Tuple[Tensor, Tensor]:
    """Contexts and table with zero columns behind them, where a GPU's kernels need these.

    Its kernels for 16-bit numbers read 16 bytes at a time, and a width such as the 410 of a
    Transformer-XL sends the products to slower ones. Zeros change no product, and the gradients of
    the added columns are cut off again.

    Args:
        contexts: h, shape (T, *, d).
        matrix: W, shape (N, d).

    Returns:
        Shapes (T, *, d') and (N, d'), d' a multiple of 8; or the tensors themselves.
    """
    missing = -matrix.size(1) % ALIGNED_COLUMNS
    if missing == 0 or not _wants_alignment(contexts, matrix):
        return contexts, matrix
    return F.pad(contexts, (0, missing)), F.pad(matrix, (0, missing))


def _wants_alignment(contexts: Tensor, matrix: Tensor) -> bool:
    return contexts.is_cuda and product_dtype(contexts, matrix) in (torch.float16, torch.bfloat16)


class BlockScores:
    """Computes the scores s = W h + b of one block of contexts after the other.

    Args:
        matrix: W, shape (N, d).
        bias: b, shape (N,).
        dtype: of the products, from :func:`product_dtype`.

    Attributes:
        table: W in the dtype of the products.
        accumulation_dtype: of the scores.
    """

    def __init__(self, matrix: Tensor, bias: Optional[Tensor], dtype: torch.dtype) -> None:
        self.table = matrix.to(dtype)
        self.accumulation_dtype = accumulation_dtype(dtype)
        self.bias = None if bias is None else bias.to(self.accumulation_dtype)

    def rows(self, contexts: Tensor, size: int) -> Tensor:
        """Return ``contexts``, shape (t, *, d), in the dtype of the products and ``size`` rows."""
        return filled(contexts.to(self.table.dtype), size)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the scores of ``rows``, shape (r, d), as a new tensor of shape (r, N)."""
        scores = matmul_transposed(rows, self.table).to(self.accumulation_dtype)
        if self.bias is not None:
            scores += self.bias
        return scores


def softmax_(scores: Tensor) -> Tensor:
    """Overwrite ``scores``, shape (*, N), by their softmax and return log sum exp, shape (*)."""
    top = scores.amax(-1)
    torch.softmax(scores, -1, out=scores)
    # exp(top - log Z) is the largest probability, which is never below 1/N.
    return top.sub_(scores.amax(-1).log_())
