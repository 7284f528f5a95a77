"""Access to a decoder's last layer while the model runs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator

from fairseq.models import FairseqDecoder
from torch import Tensor, nn

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.plugin.models.output_table import decoder_of

OutputLayer = Callable[[Tensor], Tensor]


@contextmanager
def output_layer_replaced(
    model: nn.Module, wrap: Callable[[OutputLayer], OutputLayer]
) -> Iterator[None]:
    """Let ``wrap(output_layer)`` stand for the decoder's ``output_layer`` inside the block.

    It is called within the model's own forward pass, so that data-parallel wrappers see every
    parameter used.

    Raises:
        ConfigurationError: the decoder does not end in an ``output_layer``.
    """
    check_output_layer(model)
    decoder: Any = decoder_of(model)
    decoder.output_layer = wrap(decoder.output_layer)
    try:
        yield
    finally:
        del decoder.output_layer


def calls_output_layer(model: nn.Module) -> bool:
    """Whether the decoder ends in an ``output_layer`` of its own."""
    output_layer = getattr(type(decoder_of(model)), "output_layer", None)
    # Decoders that never call one (fconv, lightconv) inherit fairseq's, which only raises.
    return callable(output_layer) and output_layer is not FairseqDecoder.output_layer


def check_output_layer(model: nn.Module) -> None:
    """Refuse a model whose output layer cannot be replaced.

    Raises:
        ConfigurationError: the decoder does not end in an ``output_layer``.
    """
    if not calls_output_layer(model):
        raise ConfigurationError(
            "a decoder with an output_layer for --adversarial-epsilon, --blockwise-loss or "
            "--gradient-gating",
            f"{type(decoder_of(model)).__name__}, which has none",
            "Use a transformer, transformer_lm or lstm arch, or drop the flag.",
        )
