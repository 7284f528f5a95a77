"""Write a Transformer of fairseq as a folder of ``transformers``, if the logits stay the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

import torch
from fairseq.modules import LearnedPositionalEmbedding, SinusoidalPositionalEmbedding
from torch import Tensor

from spectral_fairseq.checkpoints.settings import checkpoint_settings
from spectral_fairseq.commands.export_plain import (
    LogitCheck,
    build_model,
    check_known_elsewhere,
    different_logits,
    for_logits,
    plain_checkpoint,
    random_batch,
    task_like,
)
from spectral_fairseq.compat.dead_encoder_keys import DEAD
from spectral_fairseq.errors import NoEquivalentError, listed
from spectral_fairseq.provenance import distribution_version, import_transformers

# The layout of ``transformers`` in which a Transformer of fairseq computes the same logits.
#
# Note [Which layout]
# -------------------
# ``transformers`` has no single class for what fairseq's flags span. Of those with fairseq's
# attention and feed-forward blocks, what decides is where the layer norms stand and how positions
# are encoded:
#
# translation   layer norm          of the embeddings   positions
# FSMT          after each block    no                  sinusoidal
# M2M100        before, and final   no                  sinusoidal
# Bart          after each block    yes                 a table: learned or filled
# MBart         before, and final   yes                 a table
#
# Marian's sinusoids have other frequencies and start at another position, so that no model of
# fairseq fits. FSMT alone has two vocabularies; the others need tables of one size. Language models
# are XGLM where they have sinusoids, layer norms before each block and at the end, and OPT
# otherwise, whose positions are a table. OPT does not scale its embeddings: the scale goes into the
# input table, which is then stored apart from the output table.


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


def _translation(model: Any, flags: Dict[str, Any]) -> Layout:
    encoder, decoder = _Side(model.encoder), _Side(model.decoder)
    _refuse(encoder.problems() + decoder.problems())
    if any(side.before != side.final for side in (encoder, decoder)):
        _refuse(["--no-decoder-final-norm"])
    kinds = {(side.before, side.embedding_norm, side.sinusoidal) for side in (encoder, decoder)}
    if len(kinds) > 1 or encoder.scaled != decoder.scaled:
        _refuse(["an encoder and a decoder of different kinds"])
    before, embedding_norm, sinusoidal = kinds.pop()
    if not embedding_norm and not sinusoidal:
        _refuse(["learned positions without --layernorm-embedding"])
    width = model.decoder.embed_tokens.embedding_dim
    if model.encoder.embed_tokens.embedding_dim != width or model.decoder.project_in_dim:
        _refuse(["encoder, decoder and embeddings of different sizes"])
    if embedding_norm:
        name = "MBart" if before else "Bart"
    else:
        name = "M2M100" if before else "FSMT"

    source, target = model.encoder.embed_tokens.weight, model.decoder.embed_tokens.weight
    output = model.decoder.output_projection.weight
    tied = source is target and output is target
    limit = max(model.encoder.max_source_positions, model.decoder.max_target_positions)
    config = {
        "d_model": width,
        "scale_embedding": encoder.scaled,
        "max_position_embeddings": limit,
        "tie_word_embeddings": tied,
        "activation_function": _activation(flags),
        **_dropout(flags),
        **_sizes(encoder, "encoder_", "encoder_layers"),
        **_sizes(decoder, "decoder_", "decoder_layers"),
        "decoder_start_token_id": 2,
        "forced_eos_token_id": 2,
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
    if embedding_norm:
        for key, side in (("encoder", encoder), ("decoder", decoder)):
            tensors[f"model.{key}.embed_positions.weight"] = side.table(limit + 2)
        tensors["final_logits_bias"] = torch.zeros(1, len(target))
    return Layout(name, config, tensors)


def _language(model: Any, flags: Dict[str, Any]) -> Layout:
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


_ANOTHER_FORMAT = "Try --to ctranslate2 or --to fairseq, or keep this checkpoint and use fairseq."


def _refuse(problems: List[str]) -> None:
    if problems:
        found = "one with " + " and ".join(dict.fromkeys(problems))
        wanted = "a model that a layout of transformers can represent"
        raise NoEquivalentError(wanted, found, _ANOTHER_FORMAT)


_BOS, _PAD, _EOS = 0, 1, 2
_MAX_LEN_B = 200  # of fairseq-generate

# Computed by the class, or a copy that it makes of another tensor.
_NOT_NEEDED = ("embed_positions.weight", "embed_positions.weights", "final_logits_bias")


def write_huggingface(checkpoint: Mapping[str, Any], folder: Path) -> Tuple[str, LogitCheck]:
    """Write ``config.json``, ``generation_config.json`` and ``model.safetensors``.

    The model is loaded from the folder again, and its logits compared with fairseq's.

    Args:
        checkpoint: of a Transformer, of fairseq or of this package; not changed.
        folder: exists, and is removed by the caller if anything is raised.

    Returns:
        The name of the class that loads it, and how far its logits are from fairseq's.
    """
    transformers = import_transformers()
    transformers.utils.logging.disable_progress_bar()
    flags = checkpoint_settings(checkpoint, "model")
    check_known_elsewhere(flags, "a model that a layout of transformers can represent")
    plain = plain_checkpoint(checkpoint)
    task = task_like(plain["model"])
    model = build_model(plain, task)
    translation = hasattr(model, "encoder")
    layout = (_translation if translation else _language)(model, plain["cfg"]["model"])
    _save(layout, folder, translation)
    auto = transformers.AutoModelForSeq2SeqLM if translation else transformers.AutoModelForCausalLM
    loaded = auto.from_pretrained(str(folder), local_files_only=True).float().eval()
    check = _compare(model, loaded, task)
    if not check.equal:
        raise different_logits(check)
    return type(loaded).__name__, check


def _save(layout: Layout, folder: Path, translation: bool) -> None:
    transformers = import_transformers()
    config = getattr(transformers, f"{layout.name}Config")(
        bos_token_id=_BOS, pad_token_id=_PAD, eos_token_id=_EOS, **layout.config
    )
    kind = "ForConditionalGeneration" if translation else "ForCausalLM"
    model = getattr(transformers, f"{layout.name}{kind}")(config)
    absent, unknown = model.load_state_dict(layout.tensors, strict=False)
    absent = [name for name in absent if not name.endswith(_NOT_NEEDED)]
    if absent or unknown:
        found = f"{listed(absent, 3)} missing and {listed(unknown, 3)} besides"
        raise NoEquivalentError(f"the tensors of {type(model).__name__}", found, _ANOTHER_FORMAT)
    stored = model.state_dict()
    shared = [
        key
        for key, value in layout.tensors.items()
        if not torch.allclose(stored[key].to(value.dtype), value, rtol=0, atol=0, equal_nan=True)
    ]
    if shared:
        version = distribution_version("transformers")
        raise NoEquivalentError(
            f"a {type(model).__name__} that keeps tables apart",
            f"transformers {version}, which stores {listed(shared, 3)} as others",
            f"Install transformers 5 or newer. {_ANOTHER_FORMAT}",
        )
    generation = _generation(layout.config, translation)
    model.generation_config = transformers.GenerationConfig(**generation)
    model.save_pretrained(str(folder), safe_serialization=True)


def _generation(config: Mapping[str, Any], translation: bool) -> Dict[str, Any]:
    """The search of fairseq-generate with its own defaults."""
    common = {
        "bos_token_id": _EOS,  # fairseq starts every text with </s>
        "eos_token_id": _EOS,
        "pad_token_id": _PAD,
        "suppress_tokens": [_PAD],  # which fairseq never generates
    }
    if not translation:
        return common
    return {
        **common,
        "decoder_start_token_id": _EOS,
        "forced_eos_token_id": _EOS,
        "num_beams": 5,
        "early_stopping": True,
        "min_new_tokens": 1,
        "max_new_tokens": min(_MAX_LEN_B, config["max_position_embeddings"] - 1) + 1,
    }


def _compare(model: Any, loaded: Any, task: Any) -> LogitCheck:
    """Compare at the positions that are no padding, which is on the right as tokenizers put it."""
    batch = random_batch(task, model, pad_left=False)
    target = batch.get("prev_output_tokens", batch["src_tokens"])
    source = batch["src_tokens"]
    # FSMT leaves its causal mask out where it may use its cache.
    inputs = {"input_ids": source, "attention_mask": source.ne(_PAD).long(), "use_cache": False}
    if target is not source:
        inputs["decoder_input_ids"] = target
    with for_logits():
        words = target.ne(_PAD)
        return LogitCheck.of(model(**batch)[0].float()[words], loaded(**inputs).logits[words])
