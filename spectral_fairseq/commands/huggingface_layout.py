"""The layout of ``transformers`` in which a Transformer of fairseq computes the same logits.

Note [Which layout]
-------------------
``transformers`` has no single class for what fairseq's flags span. Of those with fairseq's
attention and feed-forward blocks, what decides is where the layer norms stand and how positions
are encoded:

translation   layer norm          of the embeddings   positions
FSMT          after each block    no                  sinusoidal
M2M100        before, and final   no                  sinusoidal
Bart          after each block    yes                 a table: learned or filled
MBart         before, and final   yes                 a table

Marian's sinusoids have other frequencies and start at another position, so that no model of
fairseq fits. FSMT alone has two vocabularies; the others need tables of one size. Language models
are XGLM where they have sinusoids, layer norms before each block and at the end, and OPT
otherwise, whose positions are a table. OPT does not scale its embeddings: the scale goes into the
input table, which is then stored apart from the output table.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List

import torch
from fairseq.modules import LearnedPositionalEmbedding, SinusoidalPositionalEmbedding
from torch import Tensor

from spectral_fairseq.checkpoints.dictionary import SPECIALS
from spectral_fairseq.compat.dead_encoder_keys import DEAD
from spectral_fairseq.errors import NoEquivalentError

# fairseq's name -> that of transformers. "gelu_fast" is another function there.
_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_fast": "gelu_new",
    "gelu_accurate": "gelu_new",
    "tanh": "tanh",
    "linear": "linear",
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A model as ``transformers`` stores it.

    Args:
        name: the prefix of its classes, such as ``FSMT``.
        config: arguments of ``<name>Config``.
        tensors: name -> tensor; positions that the class computes itself are left out.
    """

    name: str
    config: Dict[str, Any]
    tensors: Dict[str, Tensor]


class _Side:
    """What decides about the layout in an encoder or a decoder."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.before = bool(module.layers) and module.layers[0].normalize_before
        self.final = module.layer_norm is not None
        self.embedding_norm = module.layernorm_embedding is not None
        self.sinusoidal = isinstance(module.embed_positions, SinusoidalPositionalEmbedding)
        self.scaled = module.embed_scale != 1.0

    def problems(self) -> List[str]:
        """What no layout has, as fairseq's flags."""
        problems = [] if len(self.module.layers) else ["no layers"]
        positions = (SinusoidalPositionalEmbedding, LearnedPositionalEmbedding)
        if not isinstance(self.module.embed_positions, positions):
            problems.append("--no-token-positional-embeddings")
        return problems

    def table(self, rows: int) -> Tensor:
        """Embeddings of positions, [rows, d]; the two first rows are those before position 0."""
        positions = self.module.embed_positions
        if self.sinusoidal:
            return SinusoidalPositionalEmbedding.get_embedding(
                rows, positions.embedding_dim, positions.padding_idx
            )
        weight = positions.weight
        # Positions beyond those that were learned are never reached in fairseq.
        return torch.cat([weight, weight.new_zeros(rows - len(weight), weight.size(1))])


def translation_layout(model: Any, flags: Dict[str, Any]) -> Layout:
    """The layout of a translation model.

    Raises:
        NoEquivalentError: ``transformers`` has no model that computes the same.
    """
    encoder, decoder = _Side(model.encoder), _Side(model.decoder)
    name = _translation_class(encoder, decoder)
    source, target = model.encoder.embed_tokens.weight, model.decoder.embed_tokens.weight
    output = model.decoder.output_projection.weight
    tied = source is target and output is target
    limit = max(model.encoder.max_source_positions, model.decoder.max_target_positions)
    config = {
        "d_model": target.size(1),
        "scale_embedding": encoder.scaled,
        "max_position_embeddings": limit,
        "tie_word_embeddings": tied,
        "activation_function": _activation(flags),
        **_dropout(flags),
        **_sizes(encoder, "encoder_", "encoder_layers"),
        **_sizes(decoder, "decoder_", "decoder_layers"),
        "decoder_start_token_id": SPECIALS.index("</s>"),
        "forced_eos_token_id": SPECIALS.index("</s>"),
    }
    tensors = {f"model.{key}": tensor for key, tensor in _weights(model).items()}
    if name == "FSMT":
        config.update(
            src_vocab_size=len(source),
            tgt_vocab_size=len(target),
            langs=[flags.get("source_lang") or "source", flags.get("target_lang") or "target"],
        )
        return Layout(name, config, tensors)
    if len(source) != len(target):
        _refuse([f"source and target vocabularies of different sizes (not in {name})"])
    config["vocab_size"] = len(target)
    tensors["lm_head.weight"] = tensors.pop("model.decoder.output_projection.weight")
    tensors["model.shared.weight"] = target
    if encoder.embedding_norm:
        for key, side in (("encoder", encoder), ("decoder", decoder)):
            tensors[f"model.{key}.embed_positions.weight"] = side.table(limit + 2)
        tensors["final_logits_bias"] = torch.zeros(1, len(target))
    return Layout(name, config, tensors)


def _translation_class(encoder: _Side, decoder: _Side) -> str:
    """The prefix of the classes of a translation model; see Note [Which layout].

    Raises:
        NoEquivalentError: there are none for such an encoder and a decoder.
    """
    _refuse(encoder.problems() + decoder.problems())
    if any(side.before != side.final for side in (encoder, decoder)):
        _refuse(["--no-decoder-final-norm"])
    kinds = {(side.before, side.embedding_norm, side.sinusoidal) for side in (encoder, decoder)}
    if len(kinds) > 1 or encoder.scaled != decoder.scaled:
        _refuse(["an encoder and a decoder of different kinds"])
    before, embedding_norm, sinusoidal = kinds.pop()
    if not embedding_norm and not sinusoidal:
        _refuse(["learned positions without --layernorm-embedding"])
    widths = {side.module.embed_tokens.embedding_dim for side in (encoder, decoder)}
    if len(widths) > 1 or decoder.module.project_in_dim:
        _refuse(["encoder, decoder and embeddings of different sizes"])
    if embedding_norm:
        return "MBart" if before else "Bart"
    return "M2M100" if before else "FSMT"


def language_layout(model: Any, flags: Dict[str, Any]) -> Layout:
    """The layout of a language model; see :func:`translation_layout`."""
    decoder = _Side(model.decoder)
    _refuse(decoder.problems())
    if decoder.embedding_norm:
        _refuse(["--layernorm-embedding in a language model"])
    module = model.decoder
    table, output = module.embed_tokens.weight, module.output_projection.weight
    tied = table is output
    limit = module.max_target_positions
    config = {
        "vocab_size": len(table),
        "max_position_embeddings": limit,
        "activation_function": _activation(flags),
        **_dropout(flags),
    }
    weights = {key.removeprefix("decoder."): value for key, value in _weights(model).items()}
    weights.pop("output_projection.weight")
    if decoder.before and decoder.final and decoder.sinusoidal and not module.project_in_dim:
        sizes = _sizes(decoder, "", "num_layers")
        config.update(sizes, d_model=table.size(1), scale_embedding=decoder.scaled)
        config["tie_word_embeddings"] = tied
        tensors = {f"model.{key}": value for key, value in weights.items()}
        return Layout("XGLM", config, {**tensors, "lm_head.weight": output})
    if output.size(1) != table.size(1):
        _refuse(["--decoder-input-dim and --decoder-output-dim that differ"])
    renamed = {"layer_norm.": "final_layer_norm.", "project_in_dim.": "project_in."}
    renamed["project_out_dim."] = "project_out."
    tensors = {"lm_head.weight": output}
    for key, value in weights.items():
        for ours, theirs in renamed.items():
            if key.startswith(ours):
                key = theirs + key[len(ours) :]
        tensors[f"model.decoder.{key}"] = value
    tensors["model.decoder.embed_tokens.weight"] = table * module.embed_scale
    tensors["model.decoder.embed_positions.weight"] = decoder.table(limit + 2)
    sizes = _sizes(decoder, "", "num_hidden_layers")
    config.update(
        hidden_size=module.embed_dim,
        num_hidden_layers=sizes["num_hidden_layers"],
        num_attention_heads=sizes["attention_heads"],
        ffn_dim=sizes["ffn_dim"],
        do_layer_norm_before=decoder.before,
        _remove_final_layer_norm=not decoder.final,
        word_embed_proj_dim=table.size(1),
        tie_word_embeddings=tied and not decoder.scaled,
    )
    return Layout("OPT", config, tensors)


def _weights(model: Any) -> Dict[str, Tensor]:
    """Parameters by fairseq's names, which are those of transformers, without positions."""
    return {
        key: value
        for key, value in model.state_dict().items()
        if "embed_positions" not in key and key.rpartition(".")[2] not in {"version", *DEAD}
    }


def _sizes(side: _Side, prefix: str, layers: str) -> Dict[str, int]:
    layer = side.module.layers[0]
    return {
        layers: len(side.module.layers),
        f"{prefix}attention_heads": layer.self_attn.num_heads,
        f"{prefix}ffn_dim": layer.fc1.out_features,
    }


def _activation(flags: Dict[str, Any]) -> str:
    name = flags.get("activation_fn") or "relu"
    if name not in _ACTIVATIONS:
        _refuse([f"--activation-fn {name}"])
    return _ACTIVATIONS[name]


def _dropout(flags: Dict[str, Any]) -> Dict[str, float]:
    names = ("dropout", "attention_dropout", "activation_dropout")
    return {name: float(flags.get(name) or 0.0) for name in names}


ANOTHER_FORMAT = "Try --to ctranslate2 or --to fairseq, or keep this checkpoint and use fairseq."


def _refuse(problems: List[str]) -> None:
    if problems:
        found = "one with " + " and ".join(dict.fromkeys(problems))
        wanted = "a model that a layout of transformers can represent"
        raise NoEquivalentError(wanted, found, ANOTHER_FORMAT)
