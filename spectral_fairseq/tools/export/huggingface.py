"""Write a Transformer of fairseq as a folder of ``transformers``, if the logits stay the same."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, List, Mapping, Tuple

import torch

from spectral_fairseq.checkpoints.dictionary import checkpoint_settings
from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.provenance import distribution_version
from spectral_fairseq.tools.export.layouts import Layout, check_flags, layout_of
from spectral_fairseq.tools.export.logits import (
    LogitCheck,
    build_model,
    random_batch,
    task_like,
)
from spectral_fairseq.tools.export.plain import (
    ANOTHER_TARGET,
    different_logits,
    plain_checkpoint,
    recommending_others,
)

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

    Raises:
        CheckpointError: the logits differ.
        UnsupportedError: no layout of transformers represents this model.
    """
    with recommending_others(checkpoint, "huggingface"):
        return try_out(checkpoint, folder)


def try_out(checkpoint: Mapping[str, Any], folder: Path) -> Tuple[str, LogitCheck]:
    """The same, whose refusals name no other target."""
    transformers = import_transformers()
    transformers.utils.logging.disable_progress_bar()
    check_flags(checkpoint_settings(checkpoint, "model"))
    plain = plain_checkpoint(checkpoint)
    task = task_like(plain["model"])
    model = build_model(plain, task)
    translation = hasattr(model, "encoder")
    layout = layout_of(model, plain["cfg"]["model"])
    _save(layout, folder, translation)
    auto = transformers.AutoModelForSeq2SeqLM if translation else transformers.AutoModelForCausalLM
    loaded = auto.from_pretrained(str(folder), local_files_only=True).float().eval()
    check = _compare(model, loaded, task)
    if not check.equal:
        raise different_logits(check)
    return type(loaded).__name__, check


def import_transformers() -> Any:
    """The package ``transformers``.

    It imports torchaudio where that is installed, which fairseq requires and which fails beside a
    torch that it was not built for. No text model needs it, so it counts as absent then.

    Raises:
        ConfigurationError: it is not installed, or too new for the installed torch.
    """
    try:
        import torchaudio  # noqa: F401
    except (ImportError, OSError):
        # A transformers that was imported before, as CTranslate2 does, has seen the files of
        # torchaudio and imports it in spite of all; then an empty module serves.
        stub = ModuleType("torchaudio") if "transformers" in sys.modules else None
        sys.modules.setdefault("torchaudio", stub)  # type: ignore[arg-type]
    try:
        import transformers
        from transformers import PreTrainedModel  # noqa: F401  # lazy, and fails without torch
    except ImportError as error:
        raise ConfigurationError(
            "transformers and safetensors to be installed",
            str(error).strip().splitlines()[0],
            "Run pip install transformers safetensors sacremoses.",
        ) from error
    if not transformers.utils.is_torch_available():
        raise ConfigurationError(
            "a version of transformers that works with the installed torch",
            f"transformers {distribution_version('transformers')}, which needs a newer torch",
            'Run pip install "transformers<5", or install a newer torch.',
        )
    return transformers


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
        raise UnsupportedError(
            f"the tensors of {type(model).__name__}",
            f"{_listed(absent)} missing and {_listed(unknown)} besides",
            ANOTHER_TARGET,
        )
    stored = model.state_dict()
    shared = [
        key
        for key, value in layout.tensors.items()
        if not torch.allclose(stored[key].to(value.dtype), value, rtol=0, atol=0, equal_nan=True)
    ]
    if shared:
        version = distribution_version("transformers")
        raise UnsupportedError(
            f"a {type(model).__name__} that keeps tables apart",
            f"transformers {version}, which stores {_listed(shared)} as others",
            f"Install transformers 5 or newer. {ANOTHER_TARGET}",
        )
    model.generation_config = transformers.GenerationConfig(
        **_generation(layout.config, translation)
    )
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


def _compare(model: Any, loaded: Any, task: Any, seed: int = 1) -> LogitCheck:
    """Compare at the positions that are no padding, which is on the right as tokenizers put it."""
    batch = random_batch(task, model, torch.Generator().manual_seed(seed), pad_left=False)
    target = batch.get("prev_output_tokens", batch["src_tokens"])
    source = batch["src_tokens"]
    # FSMT leaves its causal mask out where it may use its cache.
    inputs = {"input_ids": source, "attention_mask": source.ne(_PAD).long(), "use_cache": False}
    if target is not source:
        inputs["decoder_input_ids"] = target
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched key_padding_mask", UserWarning)
        words = target.ne(_PAD)
        expected, found = model(**batch)[0].float()[words], loaded(**inputs).logits[words]
    return LogitCheck((expected - found).abs().max().item(), expected.abs().max().item())


def _listed(names: List[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") if names else "none"
