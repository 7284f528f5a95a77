"""The table an unknown fairseq model multiplies hidden states by, and access to its features."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator, List

from fairseq.models import FairseqDecoder
from torch import Tensor, nn

from spectral_fairseq.embeddings.svd import SVDEmbedding
from spectral_fairseq.errors import ConfigurationError

# Under these names the host's decoders keep an output layer (or its weight) of their own:
# transformer and most others; lstm; fconv; lightconv.
OUTPUT_LAYERS = ("output_projection", "fc_out", "fc3", "embed_out")


def decoder_of(model: nn.Module) -> nn.Module:
    """The part of a (wrapped) model that ends in the vocabulary; the model itself if it is one."""
    decoder = getattr(model, "decoder", None)
    return decoder if isinstance(decoder, nn.Module) else model


def factored_table(model: nn.Module) -> Any:
    """The output table where it is one of our own modules, else ``None``."""
    head = getattr(decoder_of(model), "output_projection", None)
    table = getattr(head, "table", None)
    return table if isinstance(table, nn.Module) else None


def output_table(model: nn.Module, num_words: int) -> Tensor:
    """The table W of the softmax, shape (N, d), differentiable.

    Args:
        model: any fairseq model with a target vocabulary, wrapped for data parallelism or not.
        num_words: N, the size of the target dictionary.

    Raises:
        ConfigurationError: no such table can be found; the message says what was looked at.
    """
    table = factored_table(model)
    if table is not None:
        return table.weight
    decoder = decoder_of(model)
    if getattr(decoder, "adaptive_softmax", None) is not None:
        raise ConfigurationError(
            "one output table for penalties on it",
            "an adaptive softmax, which splits it into pieces of different widths",
            "Drop --adaptive-softmax-cutoff, or set the penalties' weights to 0.",
        )
    for name in OUTPUT_LAYERS:
        layer = getattr(decoder, name, None)
        weight = layer if isinstance(layer, Tensor) else getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2 and weight.size(0) == num_words:
            return weight
    shared = getattr(decoder, "share_input_output_embed", False)
    weight = getattr(getattr(decoder, "embed_tokens", None), "weight", None)
    if shared and isinstance(weight, Tensor) and weight.size(0) == num_words:
        return weight
    raise ConfigurationError(
        f"a model with an output table of {num_words} rows",
        f"none in {type(decoder).__name__} (looked at {', '.join(OUTPUT_LAYERS)} and a shared "
        "embed_tokens)",
        "Use an arch whose decoder has one of these, or set the penalties' weights to 0.",
    )


def svd_tables(model: nn.Module) -> List[SVDEmbedding]:
    """The model's SVD tables, each once however often it is shared.

    Raises:
        ConfigurationError: there is none.
    """
    tables = [module for module in model.modules() if isinstance(module, SVDEmbedding)]
    if not tables:
        raise ConfigurationError(
            "a model with an SVD table for --spectrum-weight and --orthogonality-weights",
            f"none in {type(model).__name__}",
            "Use an arch such as transformer_sc, add --embedding-type svd, or set both weights "
            "to 0.",
        )
    return tables


@contextmanager
def output_layer_replaced(
    model: nn.Module, wrap: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]
) -> Iterator[None]:
    """Let ``wrap(output_layer)`` stand for the decoder's ``output_layer`` inside the block.

    It is called within the model's own forward pass, so that data-parallel wrappers see every
    parameter used.

    Raises:
        ConfigurationError: the decoder does not end in an ``output_layer``.
    """
    decoder: Any = decoder_of(model)
    output_layer = getattr(type(decoder), "output_layer", None)
    # Decoders that never call one (fconv, lightconv) inherit the host's, which only raises.
    if not callable(output_layer) or output_layer is FairseqDecoder.output_layer:
        raise ConfigurationError(
            "a decoder with an output_layer for --adversarial-epsilon or --blockwise-loss",
            f"{type(decoder).__name__}, which has none",
            "Use a transformer, transformer_lm or lstm arch, or drop the flag.",
        )
    decoder.output_layer = wrap(decoder.output_layer)
    try:
        yield
    finally:
        del decoder.output_layer
