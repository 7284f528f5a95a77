"""``--bf16`` trains on a GPU or CPU, and evaluates in bfloat16, as ``--fp16`` does in float16.

fairseq takes ``--bf16`` for a TPU's. Its commands that evaluate convert their models for ``--fp16``
alone, and compute in float32 with ``--bf16``, in silence. A model of the hub stays in float32: its
configuration is that of its training, which has no ``--path``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from typing import Any, Callable, Optional

from spectral_fairseq.compat.patching import Patch, replaces, wrapping
from spectral_fairseq.errors import clashing_flags

_FP16 = ("--fp16", "--memory-efficient-fp16")
_BF16 = ("--bf16", "--memory-efficient-bf16")


def _unneeded_bf16_without_tpu() -> Optional[str]:
    return "torch_xla is installed" if importlib.util.find_spec("torch_xla") is not None else None


@wrapping
def without_tpu(
    parser: Any, input_args: Any = None, *more: Any, original: Callable[..., Any], **kwargs: Any
) -> Any:
    """Wrap ``options.parse_args_and_arch`` so that ``--bf16`` does not imply ``--tpu``.

    Both kinds of half precision, of which fairseq says that TPUs have one, are refused.
    """
    arguments = sys.argv[1:] if input_args is None else input_args
    if {*_FP16} & {*arguments} and {*_BF16} & {*arguments}:
        raise clashing_flags(*(flag for flag in (*_FP16, *_BF16) if flag in arguments))
    parsed = original(parser, input_args, *more, **kwargs)
    args = parsed[0] if isinstance(parsed, tuple) else parsed
    # fairseq-validate and fairseq-generate parse once more without defaults: no attribute then.
    if getattr(args, "bf16", False) and "--tpu" not in arguments:
        args.tpu = False
    return parsed


BF16_WITHOUT_TPU = Patch(
    name="bf16 without TPU",
    reason="--bf16 switches to TPU training, which fails without torch_xla, on a GPU too.",
    install=replaces({"fairseq.options:parse_args_and_arch": without_tpu}),
    unneeded=_unneeded_bf16_without_tpu,
)


def _unneeded_bf16_evaluation() -> Optional[str]:
    generate = importlib.import_module("fairseq_cli.generate")
    converts = "common.bf16" in inspect.getsource(generate)
    return "this fairseq evaluates in bfloat16" if converts else None


def evaluates(cfg: Any) -> bool:
    """Whether a configuration is that of a command that evaluates a model."""
    return bool(getattr(getattr(cfg, "common_eval", None), "path", None))


@wrapping
def prepared_in_bfloat16(
    model: Any, cfg: Any, *args: Any, original: Callable[..., Any], **kwargs: Any
) -> Any:
    """Wrap ``BaseFairseqModel.prepare_for_inference_``, which gets the command's configuration."""
    if evaluates(cfg) and cfg.common.bf16:
        model.bfloat16()
    return original(model, cfg, *args, **kwargs)


@wrapping
def loading_in_bfloat16(cfg: Any, *args: Any, original: Callable[..., Any], **kwargs: Any) -> Any:
    """Wrap ``call_main``, for ``fairseq-validate``, which does not prepare its models.

    Where fairseq starts workers itself, they validate in float32.
    """
    from fairseq import checkpoint_utils

    load = checkpoint_utils.load_model_ensemble_and_task

    def load_in_bfloat16(*args: Any, **kwargs: Any) -> Any:
        models, *others = load(*args, **kwargs)
        return [model.bfloat16() for model in models], *others

    if evaluates(cfg) and cfg.common.bf16:
        checkpoint_utils.load_model_ensemble_and_task = load_in_bfloat16
    try:
        return original(cfg, *args, **kwargs)
    finally:
        checkpoint_utils.load_model_ensemble_and_task = load


BF16_EVALUATION = Patch(
    name="bf16 in evaluation",
    reason="fairseq-generate, -interactive, -eval-lm and -validate compute in float32 with --bf16.",
    install=replaces(
        {
            "fairseq.models.fairseq_model:BaseFairseqModel.prepare_for_inference_": (
                prepared_in_bfloat16
            ),
            "fairseq.distributed.utils:call_main": loading_in_bfloat16,
        }
    ),
    unneeded=_unneeded_bf16_evaluation,
)
