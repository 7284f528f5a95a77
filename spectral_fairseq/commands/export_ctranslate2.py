"""Convert a Transformer of fairseq to CTranslate2 in one step."""

from __future__ import annotations

import contextlib
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any, ContextManager, Mapping, Optional, Tuple

import torch

from spectral_fairseq.checkpoints.settings import checkpoint_settings
from spectral_fairseq.commands.export_plain import check_known_elsewhere, plain_checkpoint
from spectral_fairseq.commands.shared import naming_full_disk
from spectral_fairseq.errors import NoEquivalentError, check_choice, needs_extra

# Flags that fairseq's language models ignore and the converter does not, and the names of what a
# model stores that obeys them.
_SCALES = {
    "scale_attn": "attn_ln",
    "scale_fc": "ffn_layernorm",
    "scale_heads": "c_attn",
    "scale_resids": "w_resid",
}
_ANOTHER_FORMAT = "Try --to huggingface or --to fairseq, or keep this checkpoint and use fairseq."
_WANTED = "a model that CTranslate2's converter of fairseq takes"


def check_model(checkpoint: Mapping[str, Any]) -> None:
    """Refuse a model that has no form in CTranslate2, before its dictionaries are looked for."""
    check_known_elsewhere(checkpoint, _WANTED)


def write_ctranslate2(
    checkpoint: Mapping[str, Any],
    folder: Path,
    data: Path,
    languages: Optional[Tuple[str, str]],
    quantization: Optional[str] = None,
) -> None:
    """Fill a folder that ``ctranslate2.Translator`` or ``ctranslate2.Generator`` loads."""
    with needs_extra("export", "for CTranslate2"):
        from ctranslate2.converters import FairseqConverter
        from ctranslate2.specs.model_spec import ACCEPTED_MODEL_TYPES
    if quantization is not None:
        check_choice("`quantization`", quantization, ACCEPTED_MODEL_TYPES)
    plain = plain_checkpoint(checkpoint)
    cfg = plain["cfg"]
    absent = [flag for flag, name in _SCALES.items() if not any(name in k for k in plain["model"])]
    # The converter reads and sets the flags of task and model as attributes of one object.
    task = checkpoint_settings(checkpoint, "task")
    names = {"task": task.get("_name"), "arch": cfg["model"]["_name"]}
    flags = {**task, **cfg["model"], **names, **dict.fromkeys(absent, False)}
    plain["cfg"] = {**cfg, "model": Namespace(**flags)}
    source, target = languages or (None, None)
    with tempfile.TemporaryDirectory() as work:
        file = Path(work) / "plain.pt"
        with naming_full_disk(file, "let TMPDIR name another folder"):
            torch.save(plain, file)
        converter = FairseqConverter(str(file), str(data), source, target)
        try:
            with _namespaces_allowed():
                converter.convert(str(folder), quantization=quantization, force=True)
        except (AttributeError, KeyError, RuntimeError, ValueError) as error:
            raise NoEquivalentError(
                _WANTED, " ".join(str(error).split()), _ANOTHER_FORMAT
            ) from error


def _namespaces_allowed() -> ContextManager[None]:
    """Let the converter's safe reader take the Namespace that was just written."""
    if hasattr(torch.serialization, "safe_globals"):
        return torch.serialization.safe_globals([Namespace])
    return contextlib.nullcontext()
