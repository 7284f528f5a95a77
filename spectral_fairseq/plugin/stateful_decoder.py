"""The decoder of a language model with a state, for fairseq's training and its searches."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

from fairseq.models import FairseqIncrementalDecoder
from torch import Tensor, nn

from spectral_fairseq.heads import Head
from spectral_fairseq.lm.carry import Carry

# Such networks read any length, but fairseq asks for a number.
MAX_POSITIONS = 10**6

# Two tensors of every layer: hidden and cell state, or keys and values.
LayerPairs = List[Tuple[Tensor, Tensor]]


class StatefulDecoder(FairseqIncrementalDecoder):
    """A network over look-ups and its output layer, fed segment by segment or token by token.

    Subclasses define :meth:`read` and :meth:`step`.

    Args:
        dictionary: fairseq dictionary.
        network: what turns tokens into features, with ``layers``.
        head: output layer.
    """

    stateful = True
    batch_dim = 0  # of the tensors that are kept between the steps of a search

    def __init__(self, dictionary: Any, network: nn.Module, head: Head) -> None:
        super().__init__(dictionary)
        self.network: Any = network
        self.output_projection = head

    def forward(
        self,
        prev_output_tokens: Tensor,
        incremental_state: Any = None,
        carry: Optional[Carry] = None,
        features_only: bool = False,
        **_: Any,
    ) -> Tuple[Tensor, Dict[str, Any]]:
        """Scores of the next word after each token.

        Args:
            prev_output_tokens: shape (B, T); padding only at the right end of a row.
            incremental_state: state of fairseq's generators; with it only the tokens that it does
                not hold yet are read.
            carry: state of the streams of which the rows are segments.
            features_only: return the head's input instead of scores.

        Returns:
            Scores, shape (B, T, N), log-probabilities or logits as the head computes them; and a
            dictionary with ``features``, the last layer's outputs before dropout, shape
            (B, T, d_h), and whatever :meth:`read` adds.

        Raises:
            ConfigurationError: a carry of another number of streams.
        """
        if incremental_state is not None:
            features, extra = self.step(prev_output_tokens, incremental_state)
        else:
            features, extra = self.read(prev_output_tokens, carry)
        extra["attn"] = None  # fairseq's beam search looks it up
        return (features if features_only else self.output_layer(features)), extra

    def read(self, tokens: Tensor, carry: Optional[Carry]) -> Tuple[Tensor, Dict[str, Any]]:
        """Read a segment.

        Args:
            tokens: shape (B, T).
            carry: where the state is found before the segment, and left after it.

        Returns:
            The head's input, shape (B, T, d_h), and a dictionary with ``features``.
        """
        raise NotImplementedError

    def step(self, tokens: Tensor, incremental_state: Any) -> Tuple[Tensor, Dict[str, Any]]:
        """Read the tokens, shape (B, T), that a search's state does not hold; see :meth:`read`."""
        raise NotImplementedError

    def extract_features(
        self, prev_output_tokens: Tensor, **kwargs: Any
    ) -> Tuple[Tensor, Dict[str, Any]]:
        """The same as :meth:`forward` without the output layer."""
        return self(prev_output_tokens, features_only=True, **kwargs)

    def output_layer(self, features: Tensor) -> Tensor:
        """Scores, shape (B, T, N), of ``features``, shape (B, T, d_h)."""
        return self.output_projection(features)

    def max_positions(self) -> int:
        """Segments of any length."""
        return MAX_POSITIONS

    def reorder_incremental_state(self, incremental_state: Any, new_order: Tensor) -> None:
        """Keep the states of the hypotheses that a search keeps; fairseq calls this."""
        pairs = self._cached(incremental_state)
        if pairs is not None:
            dim = self.batch_dim
            self._cache(
                incremental_state,
                [
                    (a.index_select(dim, new_order), b.index_select(dim, new_order))
                    for a, b in pairs
                ],
            )

    def _cached(self, incremental_state: Any) -> Optional[LayerPairs]:
        cached = self.get_incremental_state(incremental_state, "layers")
        if not cached:
            return None
        layers = range(len(self.network.layers))
        return [(cached[f"first{index}"], cached[f"second{index}"]) for index in layers]

    def _cache(self, incremental_state: Any, pairs: Sequence[Sequence[Tensor]]) -> None:
        # fairseq's type for a state: named tensors.
        cached = {}
        for index, (first, second) in enumerate(pairs):
            cached[f"first{index}"], cached[f"second{index}"] = first, second
        self.set_incremental_state(incremental_state, "layers", cached)
