"""Beam search whose beams share what the encoder made of their sentence.

fairseq repeats the encoder's output for each beam, and copies it at every step, though the rows of
a sentence stay equal. Its attention has a form in which the beams of a sentence share keys and
values, ``set_beam_size``, which it uses for BART alone. While ``SequenceGenerator.generate`` runs,

1. every Transformer's attention over the encoder's output has that form, where it is faster;
2. the encoder's output is copied only when sentences have left the batch.

The scores equal fairseq's up to rounding. Servers translate with one model in several threads, and
it has one form at a time: outside of the main thread, where commands run, all is as in fairseq.
"""

from __future__ import annotations

from threading import current_thread, main_thread
from typing import Any, Callable, Optional

import torch
from fairseq.modules import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase as _DecoderLayer
from fairseq.sequence_generator import EnsembleModel
from torch import Tensor

from spectral_fairseq.compat.patching import Patch, replaces, wrapping

# Numbers in an encoder's repeated output from which sharing is faster. It has more operations.
SHARED_FROM = 2**17


class _Sentences:
    """What is done to one batch: :meth:`reorder` replaces the method of an ``EnsembleModel``."""

    def __init__(self, ensemble: EnsembleModel, beams: int) -> None:
        self.beams = beams
        self.reorder_all = ensemble.reorder_encoder_out
        self.rows = 0  # of the encoder's output, once it is repeated
        layers = (each for each in ensemble.modules() if isinstance(each, _DecoderLayer))
        attentions = (getattr(layer, "encoder_attn", None) for layer in layers)
        self.attentions = [each for each in attentions if isinstance(each, MultiheadAttention)]
        self.found = [attention.beam_size for attention in self.attentions]

    def reorder(self, encoded: Any, order: Tensor) -> Any:
        """Repeat the sentences in the first call, and copy rows only if sentences have left."""
        sentences = torch.arange(len(order), device=order.device) // self.beams
        if len(order) == self.rows and torch.equal(order // self.beams, sentences):
            return encoded
        reordered = self.reorder_all(encoded, order)
        if not self.rows and min(map(_size, reordered), default=0) >= SHARED_FROM:
            for attention in self.attentions:
                attention.beam_size = self.beams
        self.rows = len(order)
        return reordered

    def leave(self) -> None:
        """Leave the attentions as they were found."""
        for attention, beams in zip(self.attentions, self.found):
            attention.beam_size = beams


def _size(encoded: Any) -> int:
    """How many numbers an encoder has returned, if it is as a Transformer's."""
    features = encoded.get("encoder_out") if isinstance(encoded, dict) else None
    return sum(tensor.numel() for tensor in features or ())


@wrapping
def sharing_sentences(
    generator: Any, *args: Any, original: Callable[..., Any], **kwargs: Any
) -> Any:
    """Wrap ``SequenceGenerator.generate``, and leave the models as they were found.

    The method of the ensemble is replaced on the object, because TorchScript compiles the class.
    """
    ensemble = generator.model
    if type(ensemble) is not EnsembleModel or current_thread() is not main_thread():
        return original(generator, *args, **kwargs)
    sentences = _Sentences(ensemble, generator.beam_size)
    ensemble.reorder_encoder_out = sentences.reorder
    try:
        return original(generator, *args, **kwargs)
    finally:
        del ensemble.reorder_encoder_out
        sentences.leave()


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
