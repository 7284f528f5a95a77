"""Mixture of softmaxes and mixture of contexts as output layers.

Yang, Dai, Salakhutdinov, Cohen, ICLR 2018, sections 2.4 and 2.5. From features g of d_h
dimensions, over a table W of N words and d dimensions, usually that of the input embedding:

    pi  = softmax(W_pi g)                       prior, K values, no bias
    h_k = dropout(s tanh(P_k g + c_k))          contexts, k = 1..K; a dropout mask an expert
    MoS:  P(v) = sum_k pi_k softmax(W h_k + b)_v
    MoC:  P(v) = softmax(W sum_k pi_k h_k + b)_v

The scale s is 1 in the paper, whose features come from an LSTM, bounded by 1 as the tanh is. What
a Transformer hands to its output layer is not: there a larger s learns much faster, see
``docs/mixtures.md``.
"""

# No "from __future__ import annotations" here: TorchScript reads the attributes' types.
import math
from typing import Any, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import Final

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.locked_dropout import locked_dropout
from spectral_fairseq.functional.losses.blockwise import blockwise_cross_entropy
from spectral_fairseq.functional.losses.mixture import (
    log_mixture,
    log_mixture_scripted,
    mixture_cross_entropy,
    mixture_of_contexts,
)
from spectral_fairseq.heads.base import Head


class MixtureHead(Head):
    """What the two mixtures share: prior, contexts and the table.

    Args:
        table: one of :mod:`spectral_fairseq.embeddings`; it may be shared with look-ups.
        input_dim: d_h, of the features.
        components: K.
        dropout: of the contexts, each expert's apart from the others'; the prior sees none.
        bias: give the scores a bias b, shape (N,), zero at the start.
        locked_dim: dimension of the features along which one dropout mask holds (the time axis of
            a recurrent network, 0 for features of shape (time, batch, d_h)); ``None`` draws a mask
            for every position.
        context_scale: s, greater than 0.

    Raises:
        ConfigurationError: K < 1, a dropout outside [0, 1), or a scale that is not positive.
    """

    own_loss = True

    components: Final[int]
    context_dim: Final[int]
    context_scale: Final[float]
    bias: Optional[Tensor]

    def __init__(
        self,
        table: Any,
        input_dim: int,
        components: int,
        dropout: float = 0.0,
        *,
        bias: bool = False,
        locked_dim: Optional[int] = None,
        context_scale: float = 1.0,
    ) -> None:
        super().__init__(table)
        if components < 1:
            raise ConfigurationError(
                "--mixture-components to be 1 or more",
                repr(components),
                "Choose K >= 1 (the paper's is 15), or --output-head softmax for no mixture.",
            )
        if not 0.0 <= dropout < 1.0:
            raise ConfigurationError(
                "--mixture-dropout in [0, 1)", repr(dropout), "Choose a value in that range."
            )
        if not 0.0 < context_scale < math.inf:
            raise ConfigurationError(
                "--mixture-context-scale to be a number above 0",
                repr(context_scale),
                "Use 1, the paper's, or more; 4 did well with a Transformer.",
            )
        self.components = components
        self.dropout = dropout
        self.locked_dim = locked_dim
        self.context_dim = table.embedding_dim
        self.context_scale = float(context_scale)
        self.prior = nn.Linear(input_dim, components, bias=False)
        self.latent = nn.Linear(input_dim, components * self.context_dim)
        if bias:
            self.bias = nn.Parameter(torch.zeros(table.num_embeddings))
        else:
            self.register_parameter("bias", None)

    def log_prior(self, features: Tensor) -> Tensor:
        """log pi of ``features``, shape (*, d_h): shape (*, K), float32 at least."""
        logits = self.prior(features)
        if logits.dtype != torch.float64:
            logits = logits.float()
        return torch.log_softmax(logits, -1)

    def contexts(self, features: Tensor) -> Tensor:
        """h_k of ``features``, shape (*, d_h): shape (*, K, d)."""
        latent = torch.tanh(self.latent(features))  # [*, K d]
        if self.context_scale != 1.0:
            latent = latent * self.context_scale
        if self.locked_dim is None:
            latent = F.dropout(latent, self.dropout, self.training)
        else:
            latent = locked_dropout(latent, self.dropout, self.locked_dim, self.training)
        return latent.view(list(latent.shape[:-1]) + [self.components, self.context_dim])

    def loss(
        self,
        features: Tensor,
        targets: Tensor,
        label_smoothing: float = 0.0,
        ignore_index: Optional[int] = None,
    ) -> Tuple[Tensor, Tensor]:
        """As in the base: neither tokens x N nor tokens x K x N is ever held."""
        if self.locked_dim is None:
            # A mask that does not outlive its position: padding need not reach the contexts.
            features, targets = features.flatten(0, -2), targets.flatten()
            if ignore_index is not None:
                kept = targets.ne(ignore_index)
                features, targets = features[kept], targets[kept]
        contexts = self.contexts(features).flatten(0, -3)  # [T, K, d]
        log_prior = self.log_prior(features).flatten(0, -2)  # [T, K]
        return self.mixed_loss(
            contexts, log_prior, targets.flatten(), label_smoothing, ignore_index
        )

    def mixed_loss(
        self,
        contexts: Tensor,
        log_prior: Tensor,
        targets: Tensor,
        label_smoothing: float,
        ignore_index: Optional[int],
    ) -> Tuple[Tensor, Tensor]:
        """The loss from contexts, shape (T, K, d), prior, (T, K), and targets, (T,)."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """What ``repr`` shows beside the submodules."""
        return (
            f"components={self.components}, dropout={self.dropout}, locked={self.locked_dim}, "
            f"context_scale={self.context_scale}"
        )


class MixtureOfSoftmaxes(MixtureHead):
    """MoS: the experts' distributions are mixed, so that log P is not bound to rank d."""

    def forward(self, features: Tensor) -> Tensor:
        """The log-mixture of ``features``, shape (*, d_h): shape (*, N), float32.

        It is normalised: log_softmax leaves it as it is.
        """
        contexts, matrix = self.table.operands(self.contexts(features))  # [*, K, d], [N, d]
        log_prior = self.log_prior(features)  # [*, K]
        if torch.jit.is_scripting():
            return log_mixture_scripted(contexts, log_prior, matrix, self.bias)
        return log_mixture(contexts, log_prior, matrix, self.bias)

    def mixed_loss(
        self,
        contexts: Tensor,
        log_prior: Tensor,
        targets: Tensor,
        label_smoothing: float,
        ignore_index: Optional[int],
    ) -> Tuple[Tensor, Tensor]:
        """As in the base."""
        contexts, matrix = self.table.operands(contexts)
        return mixture_cross_entropy(
            contexts,
            log_prior,
            targets,
            matrix,
            self.bias,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
        )


class MixtureOfContexts(MixtureHead):
    """MoC: the contexts are mixed before one softmax; the paper's low-rank baseline."""

    def forward(self, features: Tensor) -> Tensor:
        """log P of ``features``, shape (*, d_h): shape (*, N), float32."""
        mixed = mixture_of_contexts(self.contexts(features), self.log_prior(features))  # [*, d]
        mixed, matrix = self.table.operands(mixed)
        scores = F.linear(mixed, matrix, self.bias)
        if scores.dtype != torch.float64:
            scores = scores.float()
        return torch.log_softmax(scores, -1)

    def mixed_loss(
        self,
        contexts: Tensor,
        log_prior: Tensor,
        targets: Tensor,
        label_smoothing: float,
        ignore_index: Optional[int],
    ) -> Tuple[Tensor, Tensor]:
        """As in the base."""
        mixed, matrix = self.table.operands(mixture_of_contexts(contexts, log_prior))
        return blockwise_cross_entropy(
            mixed,
            targets,
            matrix,
            self.bias,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
        )
