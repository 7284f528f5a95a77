"""Multi-head attention with relative positions, section 3.3 of Transformer-XL.

Dai et al., ACL 2019, https://aclanthology.org/P19-1285. Query i scores key j, which is i - j >= 0
positions before it, with

    A_ij = (q_i + u)' k_j + (q_i + v)' W_R R_{i-j},

where R are the sinusoids of the distance and u and v two vectors of each head. The attention
weights are softmax(A / sqrt(d_h)). The naive form is ``tests/reference/relative_attention.py``.

Note [The relative shift]
-------------------------
(q_i + v)' W_R R_r is one product for all distances r = K-1 .. 0, which in this order are the
columns of a T x K matrix P. Row i of A needs the columns of P from T-1-i on, so each row has to
move left by one column less than the row above. Putting a column of zeros in front, which makes
rows of K+1 numbers, and reading the same numbers as K+1 rows of T without the first row does
exactly that. The entries in the future of a query then are not zero but numbers of the next row,
and have to be masked.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Exists from torch 2.0 on. Its fused kernels never hold the T x K probabilities; where the bias
# needs a gradient it falls back to products like those below.
_FUSED = getattr(F, "scaled_dot_product_attention", None)
KeysValues = Tuple[Tensor, Tensor]


class Relative(NamedTuple):
    """The tensors that all layers share for one segment of T queries over K keys.

    Args:
        encodings: R of the distances K-1 .. 0, shape (K, d).
        content_bias: u, shape (heads, d_h).
        position_bias: v, shape (heads, d_h).
        masked: keys that a query must not see, shape (T, K), bool.
    """

    encodings: Tensor
    content_bias: Tensor
    position_bias: Tensor
    masked: Tensor


def relative_shift(scores: Tensor) -> Tensor:
    """Turn columns of distances into columns of keys; see Note [The relative shift].

    Args:
        scores: shape (*, T, K), column c for the distance K-1-c.

    Returns:
        Shape (*, T, K): at (i, j) the score of the distance K-T+i-j, and arbitrary numbers where
        that is negative.
    """
    *batch, queries, keys = scores.shape
    padded = F.pad(scores, (1, 0)).view(*batch, keys + 1, queries)
    return padded[..., 1:, :].reshape(*batch, queries, keys)


def sinusoids(distances: Tensor, dim: int) -> Tensor:
    """Return R: the sines, then the cosines, of ``distances`` / 10000^(2i/d).

    Args:
        distances: shape (K,), of a floating dtype.
        dim: d.

    Returns:
        Shape (K, d).
    """
    steps = torch.arange(0, dim, 2, dtype=distances.dtype, device=distances.device)
    angles = torch.outer(distances, 10000 ** (-steps / dim))  # [K, ceil(d / 2)]
    return torch.cat([angles.sin(), angles.cos()], -1)[:, :dim]


def masked_keys(
    queries: int, keys: int, reach: Optional[int], device: Optional[torch.device] = None
) -> Tensor:
    """Return the keys that a query must not see: the future, and ``reach`` or more positions back.

    Args:
        queries: T; the last query is at the position of the last key.
        keys: K.
        reach: ``None`` for no limit on the past.
        device: of the result.

    Returns:
        Shape (T, K), bool.
    """
    positions = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    distance = positions - torch.arange(keys, device=device)  # [T, K]
    future = distance < 0
    return future if reach is None else future | (distance >= reach)


class RelativeAttention(nn.Module):
    """Self-attention of a segment over itself and the positions before it.

    Args:
        dim: d, dimensions of the inputs and outputs.
        heads: number of heads.
        head_dim: d_h, dimensions of each head.
        dropout: on the attention probabilities.
    """

    def __init__(self, dim: int, heads: int, head_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.head_dim, self.dropout = heads, head_dim, dropout
        width = heads * head_dim
        self.query = nn.Linear(dim, width, bias=False)
        self.key_value = nn.Linear(dim, 2 * width, bias=False)
        self.position = nn.Linear(dim, width, bias=False)
        self.out = nn.Linear(width, dim, bias=False)

    def keys_values(self, context: Tensor) -> KeysValues:
        """Return keys and values of ``context``, (B, K, d), each of shape (B, heads, K, d_h)."""
        keys, values = self.key_value(context).chunk(2, -1)
        return self._by_head(keys), self._by_head(values)

    def forward(self, x: Tensor, context: KeysValues, relative: Relative) -> Tensor:
        """Attend from ``x`` over ``context``, and return the outputs, shape (B, T, d).

        Args:
            x: shape (B, T, d).
            context: keys and values, of which the last T are those of ``x``.
            relative: what all layers share.
        """
        keys, values = context
        queries = self._by_head(self.query(x))  # [B, H, T, d_h]
        positions = self.position(relative.encodings)  # [K, H d_h]
        positions = positions.view(-1, self.heads, self.head_dim).permute(1, 2, 0)  # [H, d_h, K]
        # sqrt(d_h) divides the queries, because they are fewer than the scores.
        by_position = (queries + relative.position_bias.unsqueeze(1)) / math.sqrt(self.head_dim)
        bias = relative_shift(torch.matmul(by_position, positions))  # [B, H, T, K]
        bias = bias.masked_fill(relative.masked, float("-inf"))
        queries = queries + relative.content_bias.unsqueeze(1)
        dropout = self.dropout if self.training else 0.0
        attended = attend(queries, keys, values, bias, dropout)  # [B, H, T, d_h]
        return self.out(attended.transpose(1, 2).flatten(2))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), x.size(1), self.heads, self.head_dim).transpose(1, 2)


def attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """Return softmax(q k' / sqrt(d_h) + bias) v, from torch's fused kernels where available.

    Args:
        queries: shape (B, H, T, d_h).
        keys: shape (B, H, K, d_h).
        values: shape (B, H, K, d_h).
        bias: shape (B, H, T, K), -inf at masked keys.
        dropout: on the attention probabilities.

    Returns:
        Shape (B, H, T, d_h).
    """
    if _FUSED is not None:
        # Under autocast the sum of queries and biases may have another dtype than the keys.
        queries, bias = queries.to(keys.dtype), bias.to(keys.dtype)
        # What ``cpu_attention.py`` puts in its place is faster where no bias needs a gradient.
        fused = _FUSED if bias.requires_grad else F.scaled_dot_product_attention
        return fused(queries, keys, values, attn_mask=bias, dropout_p=dropout)
    scores = torch.matmul(queries / math.sqrt(queries.size(-1)), keys.transpose(-1, -2)) + bias
    weights = F.dropout(torch.softmax(scores, -1), dropout, dropout > 0.0)
    return torch.matmul(weights, values)
