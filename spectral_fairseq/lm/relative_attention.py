"""Multi-head attention with relative positions, as in Transformer-XL.

Dai, Yang, Yang, Carbonell, Le, Salakhutdinov, ACL 2019 (Transformer-XL), section 3.3. Query i
scores key j, i - j >= 0 positions before it, with

    A_ij = (q_i + u)' k_j + (q_i + v)' W_R R_{i-j},

R the sinusoids of the distance, u and v two vectors a head, and attends with
softmax(A / sqrt(d_h)). The naive form is ``tests/reference/relative_attention.py``.

Note [The relative shift]
-------------------------
(q_i + v)' W_R R_r is one product for all distances r = K-1 .. 0, in this order the columns of a
T x K matrix P. Row i of A needs its columns from T-1-i on, so each row has to move left by one
less than the row above. With a column of zeros put in front, K+1 numbers a row, and the same
numbers read as K+1 rows of T without the first, exactly that has happened. What comes to stand in
the future of a query is not zero but a number of the next row: it has to be masked.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Of torch 2.0 on. Its fused kernels never hold the T x K probabilities; where the bias needs a
# gradient it falls back to products like those below.
_FUSED = getattr(F, "scaled_dot_product_attention", None)

KeysValues = Tuple[Tensor, Tensor]


class Relative(NamedTuple):
    """What all layers share for one segment of T queries over K keys.

    Args:
        encodings: R of the distances K-1 .. 0, shape (K, d).
        content_bias: u, shape (heads, d_h).
        position_bias: v, shape (heads, d_h).
        unseen: where a query must not look, shape (T, K).
    """

    encodings: Tensor
    content_bias: Tensor
    position_bias: Tensor
    unseen: Tensor


def relative_shift(scores: Tensor) -> Tensor:
    """Turn columns of distances into columns of keys; see Note [The relative shift].

    Args:
        scores: shape (*, T, K), column c for the distance K-1-c.

    Returns:
        Shape (*, T, K): at (i, j) the score of the distance K-T+i-j, and where that is negative,
        anything.
    """
    *batch, queries, keys = scores.shape
    padded = F.pad(scores, (1, 0)).view(*batch, keys + 1, queries)
    return padded[..., 1:, :].reshape(*batch, queries, keys)


def sinusoids(distances: Tensor, dim: int) -> Tensor:
    """R: sines, then cosines, of ``distances`` / 10000^(2i/d).

    Args:
        distances: shape (K,), floating.
        dim: d.

    Returns:
        Shape (K, d).
    """
    steps = torch.arange(0, dim, 2, dtype=distances.dtype, device=distances.device)
    angles = torch.outer(distances, 10000 ** (-steps / dim))  # [K, ceil(d / 2)]
    return torch.cat([angles.sin(), angles.cos()], -1)[:, :dim]


def unseen_keys(
    queries: int, keys: int, reach: Optional[int], device: Optional[torch.device] = None
) -> Tensor:
    """Where a query must not look: at the future, nor ``reach`` or more positions back.

    Args:
        queries: T; the last query stands at the last key.
        keys: K.
        reach: ``None`` for all of the past.
        device: of the result.

    Returns:
        Shape (T, K), bool.
    """
    at = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    distance = at - torch.arange(keys, device=device)  # [T, K]
    unseen = distance < 0
    return unseen if reach is None else unseen | (distance >= reach)


class RelativeAttention(nn.Module):
    """Self-attention of a segment over itself and what went before it.

    Args:
        dim: d, of the inputs and outputs.
        heads: number of heads.
        head_dim: d_h, of each.
        dropout: of the attention probabilities.
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
        """Keys and values of ``context``, shape (B, K, d): each of shape (B, heads, K, d_h)."""
        keys, values = self.key_value(context).chunk(2, -1)
        return self._by_head(keys), self._by_head(values)

    def forward(self, x: Tensor, context: KeysValues, relative: Relative) -> Tensor:
        """Attend from ``x``, shape (B, T, d), whose own keys come last in ``context``.

        Returns:
            Shape (B, T, d).
        """
        keys, values = context
        queries = self._by_head(self.query(x))  # [B, H, T, d_h]
        positions = self.position(relative.encodings)  # [K, H d_h]
        positions = positions.view(-1, self.heads, self.head_dim).permute(1, 2, 0)  # [H, d_h, K]
        # The root of d_h divides the queries, which are fewer than the scores.
        by_position = (queries + relative.position_bias.unsqueeze(1)) / math.sqrt(self.head_dim)
        bias = relative_shift(torch.matmul(by_position, positions))  # [B, H, T, K]
        bias = bias.masked_fill(relative.unseen, float("-inf"))
        queries = queries + relative.content_bias.unsqueeze(1)
        dropout = self.dropout if self.training else 0.0
        heard = attend(queries, keys, values, bias, dropout)  # [B, H, T, d_h]
        return self.out(heard.transpose(1, 2).flatten(2))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), x.size(1), self.heads, self.head_dim).transpose(1, 2)


def attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """softmax(q k' / sqrt(d_h) + bias) v, through torch's fused kernels where there are any.

    Args:
        queries: shape (B, H, T, d_h).
        keys: shape (B, H, K, d_h).
        values: shape (B, H, K, d_h).
        bias: shape (B, H, T, K), -inf where nothing is to be seen.
        dropout: of the probabilities.

    Returns:
        Shape (B, H, T, d_h).
    """
    if _FUSED is not None:
        # Under autocast the queries may be of another dtype than what the biases made.
        queries, bias = queries.to(keys.dtype), bias.to(keys.dtype)
        return _FUSED(queries, keys, values, attn_mask=bias, dropout_p=dropout)
    scores = torch.matmul(queries / math.sqrt(queries.size(-1)), keys.transpose(-1, -2)) + bias
    weights = F.dropout(torch.softmax(scores, -1), dropout, dropout > 0.0)
    return torch.matmul(weights, values)
