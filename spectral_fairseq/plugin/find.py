"""The embedding tables and the output layer of any fairseq model.

In errors ```weight``` stands for the flag that asked for a table.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

from fairseq.models import FairseqDecoder, FairseqMultiModel
from torch import Tensor, nn

from spectral_fairseq.embeddings import SVDEmbedding, Table
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.methods.output_layers import output_names

OUTPUT_LAYERS = output_names("fairseq")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside wrappers for data parallelism."""
    while "decoder" not in model._modules and isinstance(model._modules.get("module"), nn.Module):
        model = model._modules["module"]  # type: ignore[assignment]
    return model


def models_in(model: nn.Module) -> List[nn.Module]:
    """The models of a trainer's model: of several where it holds several."""
    return list(model.models.values()) if isinstance(model, FairseqMultiModel) else [model]


def is_autoregressive(model: nn.Module) -> bool:
    """Whether a model predicts each word from those before it, as most of fairseq's do."""
    return "tgt_tokens" not in inspect.signature(model.forward).parameters


def decoder_of(model: nn.Module) -> nn.Module:
    """The part of a (wrapped) model that ends in the vocabulary; the model itself if it is one."""
    decoder = getattr(model, "decoder", None)
    return decoder if isinstance(decoder, nn.Module) else model


def head_of(model: nn.Module) -> Any:
    """The module that turns features into scores: a head of this package, fairseq's or ``None``."""
    return getattr(decoder_of(model), "output_projection", None)


def table_module(model: nn.Module) -> Optional[Table]:
    """The output table if it is a module of this package, else ``None``."""
    table = getattr(head_of(model), "table", None)
    return table if isinstance(table, Table) else None


class OutputPlace(NamedTuple):
    """Where a model keeps the table of its softmax, so that it is looked for only once.

    Attributes:
        matrix: gives the tensor there, read anew at each call: wrappers for data parallelism
            replace it.
        bias: gives the bias of the scores, if there is one.
    """

    matrix: Callable[[], Tensor]
    bias: Callable[[], Optional[Tensor]]

    @classmethod
    def of(cls, owner: Any, name: str = "weight", *, is_layer: bool = False) -> OutputPlace:
        """The place of a matrix.

        Args:
            owner: a table of this package, a layer, or the decoder itself.
            name: the name of the matrix in ``owner``.
            is_layer: whether ``owner`` is a layer, whose ``bias`` may be ``None``.
        """
        layer = owner if is_layer else None
        return cls(partial(getattr, owner, name), partial(getattr, layer, "bias", None))


def output_layers(decoder: nn.Module) -> List[OutputPlace]:
    """What fairseq's decoders end in: layers, or their weights alone."""
    found = []
    for name in OUTPUT_LAYERS:
        layer = getattr(decoder, name, None)
        if isinstance(layer, Tensor):
            found.append(OutputPlace.of(decoder, name))
        elif isinstance(getattr(layer, "weight", None), Tensor):
            found.append(OutputPlace.of(layer, is_layer=True))
    return found


def output_place(model: nn.Module, num_words: int) -> OutputPlace:
    """Where the table W of the softmax is, shape (N, d).

    Args:
        model: any fairseq model with a target vocabulary, wrapped for data parallelism or not.
        num_words: N, the size of the target dictionary.

    Raises:
        ConfigurationError: no such table can be found; the message says what was looked at.
    """
    table = table_module(model)
    if table is not None:
        return OutputPlace.of(table)
    decoder = decoder_of(model)
    if getattr(decoder, "adaptive_softmax", None) is not None:
        raise ConfigurationError(
            "a single output table for `weight`",
            "an adaptive softmax, which splits it into pieces of different widths",
            "Drop --adaptive-softmax-cutoff, or drop `weight`.",
        )
    for place in output_layers(decoder):
        matrix = place.matrix()
        if matrix.dim() == 2 and matrix.size(0) == num_words:
            return place
    shared = getattr(decoder, "share_input_output_embed", False)
    weight = getattr(getattr(decoder, "embed_tokens", None), "weight", None)
    if shared and isinstance(weight, Tensor) and weight.size(0) == num_words:
        return OutputPlace.of(decoder.embed_tokens)
    raise ConfigurationError(
        f"a model with an output table of {num_words} rows for `weight`",
        f"none in {type(decoder).__name__} (looked at {', '.join(OUTPUT_LAYERS)} and a shared "
        "embed_tokens)",
        "Use an arch whose decoder has one of these, or drop `weight`.",
    )


def output_matrix(model: nn.Module, num_words: int) -> Tensor:
    """The table W of the softmax, shape (N, d), differentiable; see :func:`output_place`."""
    return output_place(model, num_words).matrix()


def is_trained(model: nn.Module, num_words: int) -> bool:
    """Whether training changes the table of the softmax, be it by one of its factors alone.

    Raises:
        ConfigurationError: no such table can be found.
    """
    table = table_module(model)
    weights = [output_matrix(model, num_words)] if table is None else table.parameters()
    return any(weight.requires_grad for weight in weights)


def find_svd_tables(model: nn.Module) -> Tuple[SVDEmbedding, ...]:
    """The model's SVD tables, each once however often it is shared."""
    return tuple(module for module in model.modules() if isinstance(module, SVDEmbedding))


def calls_output_layer(decoder: nn.Module) -> bool:
    """Whether a decoder ends in an ``output_layer`` of its own."""
    output_layer = getattr(type(decoder), "output_layer", None)
    # Decoders that never call one (fconv, lightconv) inherit fairseq's, which only raises.
    return callable(output_layer) and output_layer is not FairseqDecoder.output_layer
