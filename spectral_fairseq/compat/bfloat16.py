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
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Callable, Iterator, Optional

import torch

from spectral_fairseq.compat.commands import around_main
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


_EVALUATING: ContextVar[bool] = ContextVar("a command that evaluates in bfloat16", default=False)


@contextmanager
def evaluating(cfg: Any) -> Iterator[None]:
    """Within this context models and batches are bfloat16, if a command evaluates with it."""
    token = _EVALUATING.set(evaluates(cfg) and bool(cfg.common.bf16))
    try:
        yield
    finally:
        _EVALUATING.reset(token)


@wrapping
def loading(*args: Any, original: Callable[..., Any], **kwargs: Any) -> Any:
    """Wrap ``load_model_ensemble_and_task``, through which these commands load their models."""
    models, *others = original(*args, **kwargs)
    if _EVALUATING.get():
        models = [model.bfloat16() for model in models]
    return (models, *others)


def narrowed(collate: Callable[..., Any], samples: Any) -> Any:
    """A batch whose float32 numbers, such as those of speech, are bfloat16, as in training."""
    from fairseq import utils

    return utils.apply_to_sample(
        lambda held: held.bfloat16() if held.dtype == torch.float32 else held, collate(samples)
    )


@wrapping
def batching(
    self: Any,
    dataset: Any,
    collate_fn: Any,
    *args: Any,
    original: Callable[..., None],
    **kwargs: Any,
) -> None:
    """Wrap ``EpochBatchIterator.__init__``, through which these commands read their batches."""
    if _EVALUATING.get():
        collate_fn = partial(narrowed, collate_fn)
    original(self, dataset, collate_fn, *args, **kwargs)


def _install_bf16_evaluation() -> str:
    places = {
        **around_main(evaluating),
        "fairseq.checkpoint_utils:load_model_ensemble_and_task": loading,
        "fairseq.data.iterators:EpochBatchIterator.__init__": batching,
    }
    return replaces(places)()


BF16_EVALUATION = Patch(
    name="bf16 in evaluation",
    reason="fairseq-generate, -interactive, -eval-lm and -validate compute in float32 with --bf16.",
    install=_install_bf16_evaluation,
    unneeded=_unneeded_bf16_evaluation,
)
