"""SimCut's perturbation: some positions of the embedded input are set to zero.

Gao et al., "Bi-SimCut", NAACL 2022, https://aclanthology.org/2022.naacl-main.289/.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, List

import torch
from torch import Tensor, nn

from spectral_fairseq.plugin.models.output_table import decoder_of, look_ups


@contextmanager
def every_second_row_cut(model: nn.Module, probability: float, padding_idx: int) -> Iterator[None]:
    """Set embeddings of the rows 1, 3, 5, .. of a batch to zero inside the block.

    Each position is cut with the given probability, whatever the kind of the table, before the
    scale and the positions are applied; the others keep their values. The last token of a source,
    which ends the sentence, and the first of a decoder's input, which starts it, are never cut.

    Args:
        model: runs within the block, on token rows that come in pairs.
        probability: of each position.
        padding_idx: token of positions without a word.
    """
    decoding: List[bool] = []  # whether the decoder has started

    def cut(_: nn.Module, inputs: Any, vectors: Tensor) -> Tensor:
        words = inputs[0].ne(padding_idx)  # [2b, t]
        order = words if decoding else words.flip(1)
        protected = order.cumsum(1).eq(1)  # the first or the last word, and padding next to it
        if not decoding:
            protected = protected.flip(1)
        drawn = torch.rand(words.shape, device=words.device) < probability
        drawn &= words & ~protected
        drawn[::2] = False
        return vectors.masked_fill(drawn.unsqueeze(-1), 0.0)

    hooks = [
        decoder_of(model).register_forward_pre_hook(lambda *_: decoding.append(True)),
        *(one.register_forward_hook(cut) for one in look_ups(model)),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
