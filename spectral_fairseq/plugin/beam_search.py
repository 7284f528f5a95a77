"""Beam search whose beams share what the encoder made of their sentence.

fairseq repeats the encoder's output for each beam, and copies it at every step, though the rows of
a sentence stay equal. Its attention can compute with one row of keys and values for all beams of a
sentence, a form that it uses for BART alone. In ``SequenceGenerator.generate``

1. every Transformer's attention over the encoder's output has that form, where it is faster;
2. the encoder's output is copied only when sentences have left the batch.

The scores equal fairseq's up to rounding.

Note [The state of one search]
------------------------------
fairseq chooses the form by a number on the attention, ``set_beam_size``, which it leaves there: a
BART that is trained with ``--eval-bleu`` then attends to every fifth sentence alone, and whatever
else uses the model meanwhile (another thread, a search within a search) has the wrong number. Here
BART never sets the number, and it is taken back from the models of other plugins, some of which
have a copy of BART's function. Attention takes the form by the shapes of what it finds in the
incremental state, which belongs to one search, and so does the ensemble that puts it there.
"""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, List, Optional

import torch
from fairseq.models.transformer import TransformerDecoderBase
from fairseq.modules import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator
from torch import Tensor, nn

from spectral_fairseq.compat.patching import Patch, replaces, wrapping

# Numbers in an encoder's repeated output from which sharing is faster. It has more operations.
SHARED_FROM = 2**17
_STATE = "attn_state"  # under which attention keeps keys and values in the incremental state


class _SharingEnsemble(EnsembleModel):
    """An ensemble in one search.

    Args:
        ensemble: its modules are shared, and are not changed.
        beams: rows of a sentence.
    """

    def __init__(self, ensemble: EnsembleModel, beams: int) -> None:
        self.__dict__.update(vars(ensemble))  # instead of making a new one
        self.beams = beams
        self.rows = 0  # of the encoder's output, once it is repeated
        self.sharing: Optional[List[List[MultiheadAttention]]] = None  # of each model

    def reorder_encoder_out(self, encoder_outs: Any, new_order: Tensor) -> Any:
        """Repeat the sentences in the first call, and copy rows only if sentences have left."""
        if len(new_order) == self.rows and not self._have_left(new_order):
            return encoder_outs
        self.rows = len(new_order)
        return super().reorder_encoder_out(encoder_outs, new_order)

    def _have_left(self, order: Tensor) -> bool:
        sentences = torch.arange(len(order), device=order.device) // self.beams
        return not torch.equal(order // self.beams, sentences)

    def forward_decoder(
        self,
        tokens: Tensor,
        encoder_outs: List[Any],
        incremental_states: List[Dict[str, Any]],
        temperature: float = 1.0,
    ) -> Any:
        """Compute the keys and values of each sentence before the first step."""
        if self.sharing is None:
            self.sharing = [[] for _ in self.models]
            for index, (model, encoded) in enumerate(zip(self.models, encoder_outs)):
                if self.has_incremental_states() and _size(encoded) >= SHARED_FROM:
                    self.sharing[index] = attentions_over_encoder(model)
                for attention in self.sharing[index]:
                    state = _keys_and_values(attention, encoded, self.beams)
                    attention.set_incremental_state(incremental_states[index], _STATE, state)
        return super().forward_decoder(tokens, encoder_outs, incremental_states, temperature)

    def reorder_incremental_state(
        self, incremental_states: List[Dict[str, Any]], new_order: Tensor
    ) -> None:
        """Reorder what belongs to beams; of what belongs to sentences keep those that stay."""
        stay = new_order.view(-1, self.beams)[:, 0] // self.beams
        kept: List[Dict[str, Any]] = []
        for state, attentions in zip(incremental_states, self.sharing or ()):
            keys = [attention._get_full_incremental_state_key(_STATE) for attention in attentions]
            kept.append({key: state.pop(key) for key in keys})
        super().reorder_incremental_state(incremental_states, new_order)
        for state, buffers in zip(incremental_states, kept):
            for key, buffer in buffers.items():
                state[key] = {
                    name: None if held is None else _rows(held, stay)
                    for name, held in buffer.items()
                }


def _rows(held: Tensor, stay: Tensor) -> Tensor:
    return held if len(held) == len(stay) else held.index_select(0, stay)


def _size(encoded: Any) -> int:
    """How many numbers an encoder has returned, if it is as a Transformer's."""
    features = encoded.get("encoder_out") if isinstance(encoded, dict) else None
    return sum(tensor.numel() for tensor in features) if isinstance(features, list) else 0


def attentions_over_encoder(model: nn.Module) -> List[MultiheadAttention]:
    """The attentions whose keys and values are computed from the encoder's output alone.

    They are those of fairseq's own Transformer decoders. Of a decoder whose forward pass is another
    there are none.
    """
    decoder = getattr(model, "decoder", None)
    way = "extract_features_scriptable"
    if getattr(type(decoder), way, None) is not getattr(TransformerDecoderBase, way):
        return []
    layers: List[Any] = list(decoder.layers)  # type: ignore[union-attr, arg-type]
    attending = [layer for layer in layers if getattr(layer, "encoder_attn", None) is not None]
    if any(type(one).forward is not TransformerDecoderLayerBase.forward for one in attending):
        return []
    if any(type(one.encoder_attn) is not MultiheadAttention for one in attending):
        return []
    return [layer.encoder_attn for layer in attending]


def _keys_and_values(
    attention: MultiheadAttention, encoded: Dict[str, List[Tensor]], beams: int
) -> Dict[str, Optional[Tensor]]:
    """What attention would keep of the first row of each sentence, in its own form.

    Args:
        attention: an attention layer of the decoder.
        encoded: the encoder's output, of which each sentence has ``beams`` equal rows.
        beams: rows of a sentence.
    """
    features = encoded["encoder_out"][0][:, ::beams]  # [time, sentences, width]
    time, sentences, _ = features.shape
    heads = (time, sentences, attention.num_heads, attention.head_dim)
    masks = encoded["encoder_padding_mask"]
    return {
        "prev_key": attention.k_proj(features).view(heads).permute(1, 2, 0, 3).contiguous(),
        "prev_value": attention.v_proj(features).view(heads).permute(1, 2, 0, 3).contiguous(),
        "prev_key_padding_mask": masks[0][::beams] if masks else None,
    }


@wrapping
def sharing_sentences(
    generator: Any, *args: Any, original: Callable[..., Any], **kwargs: Any
) -> Any:
    """Wrap ``SequenceGenerator.generate``. See Note [The state of one search]."""
    if type(generator) is not SequenceGenerator or type(generator.model) is not EnsembleModel:
        return original(generator, *args, **kwargs)
    search = copy.copy(generator)
    ensemble = _SharingEnsemble(generator.model, generator.beam_size)
    search._modules = {**generator._modules, "model": ensemble}
    return original(search, *args, **kwargs)


@wrapping
def setting_nothing(self: Any, beam: int, *, original: Callable[..., Any]) -> None:  # noqa: ARG001
    """Replace ``BARTModel.set_beam_size``. See Note [The state of one search]."""


@wrapping
def keeping_no_number(self: Any, beam_size: int, *, original: Callable[..., None]) -> None:
    """Wrap ``EnsembleModel.set_decoder_beam_size``. See Note [The state of one search].

    Beside the number such a model has an encoder whose output is not repeated for the beams.
    """
    original(self, beam_size)
    for module in self.models.modules():
        if type(module) is MultiheadAttention:
            module.beam_size = 1
        unrepeated = getattr(module, "_reorder_encoder_out", None)
        if unrepeated is not None and vars(module).get("reorder_encoder_out") == unrepeated:
            del module.reorder_encoder_out


def _unneeded_sharing() -> Optional[str]:
    has_form = hasattr(MultiheadAttention, "set_beam_size")
    return None if has_form else "the attention of this fairseq has no form for it"


SHARED_SENTENCES = Patch(
    name="beams that share a sentence",
    reason="Beam search copies the encoder's output at each step, and computes the keys and values "
    "of a sentence for each of its beams; for BART it leaves the number of beams on the model.",
    install=replaces(
        {
            "fairseq.sequence_generator:SequenceGenerator.generate": sharing_sentences,
            "fairseq.sequence_generator:EnsembleModel.set_decoder_beam_size": keeping_no_number,
            "fairseq.models.bart.model:BARTModel.set_beam_size": setting_nothing,
        }
    ),
    unneeded=_unneeded_sharing,
)
