"""Beam search whose beams share what the encoder made of their sentence.

fairseq repeats the encoder's output for each beam, and copies it at every step, though the rows of
a sentence stay equal. Its attention has a form in which the beams of a sentence share keys and
values, ``set_beam_size``, which it uses for BART alone. While ``SequenceGenerator.generate`` runs,

1. every Transformer's attention over the encoder's output has that form;
2. the encoder's output is copied only when sentences have left the batch.

The scores equal fairseq's up to rounding.
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional

import torch
from fairseq.modules import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from fairseq.sequence_generator import EnsembleModel
from torch import Tensor, nn

from spectral_fairseq.compat.patching import Patch, replaces, wrapping


def _attentions_over_encoder(model: nn.Module) -> List[Any]:
    layers = (each for each in model.modules() if isinstance(each, TransformerDecoderLayerBase))
    attentions = [getattr(layer, "encoder_attn", None) for layer in layers]
    return [attention for attention in attentions if isinstance(attention, MultiheadAttention)]


def _copying_when_sentences_leave(beams: int, reorder: Callable[..., Any]) -> Callable[..., Any]:
    """``EnsembleModel.reorder_encoder_out`` for one batch: its first call repeats the sentences."""
    rows = 0  # of the encoder's output, once it is repeated

    def reordered(encoded: Any, order: Tensor) -> Any:
        nonlocal rows
        sentences = torch.arange(len(order), device=order.device) // beams
        if len(order) == rows and torch.equal(order // beams, sentences):
            return encoded
        rows = len(order)
        return reorder(encoded, order)

    return reordered


@wrapping
def sharing_sentences(
    generator: Any, *args: Any, original: Callable[..., Any], **kwargs: Any
) -> Any:
    """Wrap ``SequenceGenerator.generate``, and leave the models as they were found.

    The methods of the ensemble are replaced on the object, because TorchScript compiles the class.
    """
    ensemble, beams = generator.model, generator.beam_size
    if type(ensemble) is not EnsembleModel:
        return original(generator, *args, **kwargs)
    attentions = _attentions_over_encoder(ensemble)
    found = [attention.beam_size for attention in attentions]
    for attention in attentions:
        attention.beam_size = beams
    ensemble.reorder_encoder_out = _copying_when_sentences_leave(
        beams, ensemble.reorder_encoder_out
    )
    try:
        return original(generator, *args, **kwargs)
    finally:
        del ensemble.reorder_encoder_out
        for attention, before in zip(attentions, found):
            attention.beam_size = before


def _unneeded_sharing() -> Optional[str]:
    has_form = hasattr(MultiheadAttention, "set_beam_size")
    return None if has_form else "the attention of this fairseq has no form for it"


SHARED_SENTENCES = Patch(
    name="beams that share a sentence",
    reason="Beam search copies the encoder's output at each step, and computes the keys and values "
    "of a sentence for each of its beams.",
    install=replaces({"fairseq.sequence_generator:SequenceGenerator.generate": sharing_sentences}),
    unneeded=_unneeded_sharing,
)
