"""Write a Transformer of fairseq as a folder of ``transformers``, if the logits stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Mapping, Tuple

import torch

from spectral_fairseq.checkpoints.dictionary import SPECIALS
from spectral_fairseq.commands.export_plain import check_known_elsewhere, plain_checkpoint
from spectral_fairseq.commands.huggingface_layout import (
    ANOTHER_FORMAT,
    Layout,
    language_layout,
    translation_layout,
)
from spectral_fairseq.commands.logit_check import (
    LogitCheck,
    build_model,
    for_logits,
    random_batch,
    task_like,
)
from spectral_fairseq.errors import NoEquivalentError, listed
from spectral_fairseq.provenance import distribution_version, import_transformers

_BOS, _PAD, _EOS = map(SPECIALS.index, ("<s>", "<pad>", "</s>"))
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
    check_known_elsewhere(checkpoint, "a model that a layout of transformers can represent")
    plain = plain_checkpoint(checkpoint)
    task = task_like(plain["model"])
    model = build_model(plain, task)
    translation = hasattr(model, "encoder")
    layout = (translation_layout if translation else language_layout)(model, plain["cfg"]["model"])
    _save(layout, folder, translation)
    auto = transformers.AutoModelForSeq2SeqLM if translation else transformers.AutoModelForCausalLM
    loaded = auto.from_pretrained(str(folder), local_files_only=True).float().eval()
    return type(loaded).__name__, _compare(model, loaded, task).refuse_unequal()


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
        raise NoEquivalentError(f"the tensors of {type(model).__name__}", found, ANOTHER_FORMAT)
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
            f"Install transformers 5 or newer. {ANOTHER_FORMAT}",
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
        **{name: config[name] for name in ("decoder_start_token_id", "forced_eos_token_id")},
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
