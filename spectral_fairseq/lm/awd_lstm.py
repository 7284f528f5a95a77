"""AWD-LSTM: the recurrent network from tokens to the features for an output layer.

Merity, Keskar, Socher: "Regularizing and Optimizing LSTM Language Models", ICLR 2018,
https://openreview.net/forum?id=SyyGPP0TZ. Three or more LSTM layers with

- DropConnect on the hidden-to-hidden weights: a new mask of each layer for every segment;
- locked dropout after the look-up, between layers and on the output: one mask for a segment;
- word dropout on the look-up only, never on the table that the output layer shares.

Yang et al., ICLR 2018, https://openreview.net/forum?id=HkwZSG-CZ, use the same network with a
mixture of softmaxes and a last layer of a different width.

Flags: ``--decoder-embed-dim`` 400, ``--decoder-hidden-size`` 1150, ``--decoder-last-hidden-size``,
    ``--decoder-layers`` 3, ``--untied-output`` off, ``--dropout`` 0.4, ``--input-dropout`` 0.65,
    ``--hidden-dropout`` 0.2, ``--word-dropout`` 0.1, ``--weight-drop`` 0.5,
    ``--activation-regularization`` 2, ``--temporal-activation-regularization`` 1.
In order: ``plugin/awd_lstm.py: AWDLSTMLanguageModel``, ``lm/carry.py: Carry``,
    ``AWDLSTM.forward``.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectral_fairseq.embeddings import Table
from spectral_fairseq.functional.dropout import locked_dropout, word_dropout
from spectral_fairseq.lm.carry import check_carried
from spectral_fairseq.lm.checks import check_layer_sizes, check_probabilities

TIME = 1  # the time axis of (streams, time, dimensions)

# Hidden and cell state, each of shape (1, B, width), for every layer.
State = List[Tuple[Tensor, Tensor]]


class Features(NamedTuple):
    """The network's results for a segment.

    Args:
        dropped: outputs of the last layer after output dropout, shape (B, T, d_h); the input of
            the output layer.
        raw: the same before output dropout.
        state: the state after the segment, still attached to the graph.
    """

    dropped: Tensor
    raw: Tensor
    state: State


class WeightDropLSTM(nn.Module):
    """One LSTM layer with DropConnect on its hidden-to-hidden weights in training.

    The masked matrix is passed to a functional LSTM and never stored in the module: the weight
    remains one parameter in training, in evaluation and in checkpoints.

    Args:
        input_dim: dimensions of each step.
        width: dimensions of the outputs and of the hidden and the cell state.
        weight_drop: probability that an entry of the hidden-to-hidden matrix is 0 for a segment.
    """

    def __init__(self, input_dim: int, width: int, weight_drop: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(input_dim, width)
        self.weight_drop = weight_drop

    def forward(
        self, steps: Tensor, state: Optional[Tuple[Tensor, Tensor]]
    ) -> Tuple[Tensor, Tuple[Tensor, Tensor]]:
        """Return the outputs, shape (T, B, width), and the state after ``steps``, (T, B, d)."""
        if not self.training or self.weight_drop == 0.0:
            return self.lstm(steps, state)
        lstm: Any = self.lstm
        if state is None:
            zeros = steps.new_zeros(1, steps.size(1), lstm.hidden_size)
            state = (zeros, zeros)
        # Like dropout, DropConnect scales the remaining entries.
        recurrent = F.dropout(lstm.weight_hh_l0, self.weight_drop, True)
        weights = [lstm.weight_ih_l0, recurrent, lstm.bias_ih_l0, lstm.bias_hh_l0]
        outputs, hidden, cell = torch.lstm(
            steps, state, weights, True, 1, 0.0, True, False, False
        )  # has biases, layers, dropout between layers, training, bidirectional, batch first
        return outputs, (hidden, cell)


class AWDLSTM(nn.Module):
    """Look-up, LSTM layers and their dropouts.

    Args:
        embed_tokens: one of :mod:`spectral_fairseq.embeddings`, N x d; it may be shared with an
            output layer.
        hidden_dim: width of every layer except the last.
        last_dim: d_h, width of the last layer; d for a tied softmax.
        layers: number of layers, 1 or more.
        dropout: on the outputs of the last layer, locked.
        input_dropout: on embedded words, locked.
        hidden_dropout: between layers, locked.
        word_dropout: probability that a word type is dropped from the look-up.
        weight_drop: of the hidden-to-hidden matrix of each layer.

    Raises:
        ConfigurationError: no layer, a width below 1, or a probability outside [0, 1).
    """

    def __init__(
        self,
        embed_tokens: Table,
        hidden_dim: int,
        last_dim: int,
        layers: int,
        *,
        dropout: float = 0.0,
        input_dropout: float = 0.0,
        hidden_dropout: float = 0.0,
        word_dropout: float = 0.0,
        weight_drop: float = 0.0,
    ) -> None:
        super().__init__()
        check_layer_sizes(layers=layers, hidden_dim=hidden_dim, last_dim=last_dim)
        check_probabilities(
            dropout=dropout,
            input_dropout=input_dropout,
            hidden_dropout=hidden_dropout,
            word_dropout=word_dropout,
            weight_drop=weight_drop,
        )
        self.embed_tokens = embed_tokens
        self.dropout = dropout
        self.input_dropout = input_dropout
        self.hidden_dropout = hidden_dropout
        self.word_dropout = word_dropout
        widths = [embed_tokens.embedding_dim] + [hidden_dim] * (layers - 1) + [last_dim]
        self.layers = nn.ModuleList(
            WeightDropLSTM(before, after, weight_drop) for before, after in zip(widths, widths[1:])
        )

    def forward(self, tokens: Tensor, state: Optional[State] = None) -> Features:
        """Compute the features of a segment.

        Args:
            tokens: shape (B, T), each row a separate stream.
            state: the state after the previous segment of the streams; ``None`` at their start.

        Raises:
            ConfigurationError: the state has another number of streams or layers.
        """
        if state is not None:
            check_carried(len(state), state[0][0].size(1), len(self.layers), tokens.size(0))
        embedded = self.embed_tokens(tokens)  # [B, T, d]
        embedded = word_dropout(
            embedded, tokens, self.embed_tokens.num_embeddings, self.word_dropout, self.training
        )
        steps = locked_dropout(embedded, self.input_dropout, TIME, self.training).transpose(0, 1)
        after: State = []
        for index, layer in enumerate(self.layers):
            if index > 0:
                steps = locked_dropout(steps, self.hidden_dropout, 0, self.training)
            steps, layer_state = layer(steps, None if state is None else state[index])  # [T, B, *]
            after.append(layer_state)
        raw = steps.transpose(0, 1).contiguous()  # [B, T, d_h]
        return Features(locked_dropout(raw, self.dropout, TIME, self.training), raw, after)


def detached(state: State) -> State:
    """Return ``state`` detached from the graph, where back-propagation is truncated."""
    return [(hidden.detach(), cell.detach()) for hidden, cell in state]
