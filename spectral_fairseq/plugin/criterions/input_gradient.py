"""``--input-gradient-scale``: how much the look-ups of a tied table count against its softmax.

Lopardo, Harish, Arnett, Gupta: "Weight Tying Biases Token Embeddings Towards the Output Space",
2026, https://arxiv.org/abs/2603.26663. The gradient of a tied table is the sum of that of its
softmax, which every word receives at every position, and that of its look-ups, which only the words
of the batch receive. The authors multiply the second to make the table a better input.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import Any, Iterator, List

from torch import Tensor, nn

from spectral_fairseq.errors import ConfigurationError, arguments_as_flags
from spectral_fairseq.functional.gradient_scale import scaled_gradient
from spectral_fairseq.plugin.criterions.penalties.needs import ModelView
from spectral_fairseq.plugin.flags import Flag, checked
from spectral_fairseq.plugin.models.output_table import look_ups, output_table, table_module

INPUT_GRADIENT_SCALE = Flag(
    "input_gradient_scale",
    1.0,
    "factor of the gradient that a tied output table receives from its look-ups; 1 leaves it",
    checked("to be a finite number > 0", lambda value: 0 < value < math.inf),
)


def tied_look_ups(view: ModelView) -> List[nn.Module]:
    """The modules that embed tokens with the table of the softmax.

    Raises:
        ConfigurationError: there is none; it says how to share the table.
    """
    shared: Any = table_module(view.module)
    if shared is None:
        with arguments_as_flags(weight=INPUT_GRADIENT_SCALE.option):
            shared = output_table(view.module, view.words.rows)
    found = look_ups(view.module)
    tied = [one for one in found if shared is one or shared is getattr(one, "weight", None)]
    if not tied:
        raise ConfigurationError(
            f"a table that look-ups and softmax share, for {INPUT_GRADIENT_SCALE.option}",
            f"{type(view.module).__name__} with separate tables",
            "Add --share-decoder-input-output-embed or --share-all-embeddings, or drop the flag.",
        )
    return tied


@contextmanager
def input_gradients_scaled(view: ModelView, scale: float) -> Iterator[None]:
    """Multiply the gradients of the look-ups that happen inside the block."""

    def scaled(_: nn.Module, __: Any, vectors: Tensor) -> Tensor:
        return scaled_gradient(vectors, scale)

    tied = tied_look_ups(view) if scale != 1.0 else []
    hooks = [one.register_forward_hook(scaled) for one in tied]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
