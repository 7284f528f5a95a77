"""Transformer-XL: the network from tokens to the features for an output layer.

Dai, Yang, Yang, Carbonell, Le, Salakhutdinov: "Transformer-XL: Attentive Language Models beyond a
Fixed-Length Context", ACL 2019, https://aclanthology.org/P19-1285/. Each layer consists of relative
attention (``relative_attention.py``) and a feed-forward part, each followed by its residual sum
and layer normalisation. A layer attends over the segment and over the M positions before it, whose
inputs to this layer were stored without a gradient when they were computed (section 3.2).

Flags: ``--decoder-embed-dim`` 410, ``--decoder-layers`` 16, ``--decoder-attention-heads`` 10,
    ``--decoder-head-dim``, ``--decoder-ffn-embed-dim`` 2100, ``--dropout`` 0.1,
    ``--attention-dropout`` 0, ``--mem-len`` 150, ``--clamp-len`` 0, ``--same-length`` off.
In order: ``TransformerXL.forward``, ``TransformerXLLayer``,
    ``lm/relative_attention.py: RelativeAttention``.

Note [Reach of a memory]
------------------------
While M is at least as long as the stream so far, segments with memory compute exactly what one long
segment computes. With a shorter M a position attends over its segment of T tokens and over the M
positions before it, in each of L layers: it depends on at most the L (M + T - 1) tokens before it.
With ``same_length`` each query sees the M keys up to its own, whatever segment they are in: the
features then do not depend on where a stream is cut, and equal those of one long segment that
starts L (M - 1) tokens earlier.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectral_fairseq.embeddings import Table
from spectral_fairseq.errors import check_range
from spectral_fairseq.functional.precision import at_least_float32
from spectral_fairseq.lm.carry import check_carried
from spectral_fairseq.lm.checks import check_layer_sizes, check_probabilities
from spectral_fairseq.lm.relative_attention import (
    KeysValues,
    Relative,
    RelativeAttention,
    masked_keys,
    sinusoids,
)

# The stored inputs of each layer, shape (B, M, d), oldest first.
State = List[Tensor]


class Features(NamedTuple):
    """The network's results for a segment.

    Args:
        dropped: outputs of the last layer after dropout, shape (B, T, d); the input of the output
            layer.
        raw: the same before dropout.
        state: the memory after the segment, detached.
        layers: the input of the first layer and the output of each, shape (B, T, d) each.
    """

    dropped: Tensor
    raw: Tensor
    state: State
    layers: List[Tensor]


class TransformerXLLayer(nn.Module):
    """Relative attention and a feed-forward part, with normalisation after each residual sum.

    Args:
        dim: d.
        heads: number of heads.
        head_dim: d_h, dimensions of each head.
        ffn_dim: width of the feed-forward part.
        dropout: on the outputs of both parts and on the inner activations of the second.
        attention_dropout: on the attention probabilities.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        ffn_dim: int,
        dropout: float,
        attention_dropout: float,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention = RelativeAttention(dim, heads, head_dim, attention_dropout)
        self.attention_norm = nn.LayerNorm(dim)
        self.inner = nn.Linear(dim, ffn_dim)
        self.outer = nn.Linear(ffn_dim, dim)
        self.ffn_norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, context: KeysValues, relative: Relative) -> Tensor:
        """Return the outputs, shape (B, T, d), of ``x``, shape (B, T, d).

        Args:
            x: inputs of the layer.
            context: keys and values of this layer, of which the last T are those of ``x``.
            relative: what all layers share.
        """
        x = self.attention_norm(x + self._dropped(self.attention(x, context, relative)))
        inner = self._dropped(F.relu(self.inner(x)))
        return self.ffn_norm(x + self._dropped(self.outer(inner)))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class TransformerXL(nn.Module):
    """Look-up, layers, and the memory between segments.

    Args:
        embed_tokens: one of :mod:`spectral_fairseq.embeddings`, N x d; it may be shared with an
            output layer. Its rows are multiplied by sqrt(d).
        layers: L, 1 or more.
        heads: number of heads.
        head_dim: d_h, dimensions of each head; heads * d_h may differ from d.
        ffn_dim: width of the feed-forward parts.
        dropout: on embeddings, positions, every part of a layer, and the output.
        attention_dropout: on the attention probabilities.
        mem_len: M, the number of positions in memory; 0 for no memory.
        clamp_len: larger distances are encoded as this one; 0 or less for no limit.
        same_length: let every query see exactly the ``mem_len`` keys up to its own, as far as they
            exist, instead of all of memory and segment.
        init_std: weights start from N(0, init_std), layer-normalisation weights from
            N(1, init_std), biases at 0.

    Raises:
        ConfigurationError: a size below 1, a probability outside [0, 1), a negative M, or
            ``same_length`` without a memory.
    """

    def __init__(
        self,
        embed_tokens: Table,
        layers: int,
        heads: int,
        head_dim: int,
        ffn_dim: int,
        *,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        mem_len: int = 0,
        clamp_len: int = 0,
        same_length: bool = False,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        check_layer_sizes(layers=layers, heads=heads, head_dim=head_dim, ffn_dim=ffn_dim)
        check_probabilities(dropout=dropout, attention_dropout=attention_dropout)
        what = "`mem_len` with `same_length`" if same_length else "`mem_len`"
        check_range(what, mem_len, at_least=int(same_length), whole=True)
        self.embed_tokens = embed_tokens
        self.dim = embed_tokens.embedding_dim
        self.dropout = dropout
        self.mem_len, self.clamp_len, self.same_length = mem_len, clamp_len, same_length
        self.layers = nn.ModuleList(
            TransformerXLLayer(self.dim, heads, head_dim, ffn_dim, dropout, attention_dropout)
            for _ in range(layers)
        )
        # u and v of the attention, the same for all layers.
        self.content_bias = nn.Parameter(torch.empty(heads, head_dim))
        self.position_bias = nn.Parameter(torch.empty(heads, head_dim))
        self.reset_parameters(init_std)

    def reset_parameters(self, std: float) -> None:
        """Draw all parameters except the table, which the caller initialises."""
        nn.init.normal_(self.content_bias, std=std)
        nn.init.normal_(self.position_bias, std=std)
        for module in self.layers.modules():
            if isinstance(module, (nn.Linear, nn.LayerNorm)):
                mean = 1.0 if isinstance(module, nn.LayerNorm) else 0.0
                nn.init.normal_(module.weight, mean, std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, state: Optional[State] = None) -> Features:
        """Compute the features of a segment.

        Args:
            tokens: shape (B, T), each row a separate stream; padding only at the end.
            state: the memory after the previous segment of the streams; ``None`` at their start.

        Raises:
            ConfigurationError: the memory has another number of streams or layers.
        """
        if state is not None:
            check_carried(len(state), state[0].size(0), len(self.layers), tokens.size(0))
        x = self._embedded(tokens)  # [B, T, d]
        past = 0 if state is None else min(state[0].size(1), self.mem_len)
        relative = self._relative(tokens.size(1), past + tokens.size(1), x)
        after: State = []
        layers = [x]
        layer: Any
        for index, layer in enumerate(self.layers):
            context = x
            if state is not None and past > 0:
                context = torch.cat([state[index][:, -past:].to(x.dtype), x], 1)  # [B, K, d]
            kept = context[:, max(context.size(1) - self.mem_len, 0) :].detach()
            # A view of a few rows would keep all of them in memory until the next segment.
            after.append(kept.clone() if kept.size(1) < context.size(1) else kept)
            x = layer(x, layer.attention.keys_values(context), relative)
            layers.append(x)
        return Features(self._dropped(x), x, after, layers)

    def step(
        self, tokens: Tensor, cache: Optional[Sequence[KeysValues]] = None
    ) -> Tuple[Tensor, List[KeysValues]]:
        """Continue sequences with unlimited memory, as in generation.

        Consecutive steps compute what :meth:`forward` computes for all their tokens as one segment.
        Keys and values are stored instead of the inputs of their layers.

        Args:
            tokens: the new tokens, shape (B, T).
            cache: the result of the previous step; ``None`` at the start of the sequences.

        Returns:
            The features of the new tokens, shape (B, T, d), and the cache.
        """
        x = self._embedded(tokens)
        past = 0 if cache is None else cache[0][0].size(2)
        relative = self._relative(tokens.size(1), past + tokens.size(1), x)
        grown: List[KeysValues] = []
        layer: Any
        for index, layer in enumerate(self.layers):
            keys, values = layer.attention.keys_values(x)
            if cache is not None:
                keys = torch.cat([cache[index][0], keys], 2)
                values = torch.cat([cache[index][1], values], 2)
            grown.append((keys, values))
            x = layer(x, (keys, values), relative)
        return x, grown

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self._dropped(self.embed_tokens(tokens) * self.dim**0.5)

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    def _relative(self, queries: int, keys: int, like: Tensor) -> Relative:
        dtype = at_least_float32(like.dtype)
        distances = torch.arange(keys - 1, -1, -1, dtype=dtype, device=like.device)
        if self.clamp_len > 0:
            distances = distances.clamp(max=self.clamp_len)
        return Relative(
            self._dropped(sinusoids(distances, self.dim).to(like.dtype)),
            self.content_bias,
            self.position_bias,
            masked_keys(queries, keys, self.mem_len if self.same_length else None, like.device),
        )
