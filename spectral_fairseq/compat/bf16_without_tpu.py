"""``--bf16`` trains on a GPU or CPU, not only on a TPU."""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import Any, Callable, Optional

from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.errors import ConfigurationError

_FP16 = ("--fp16", "--memory-efficient-fp16")
_BF16 = ("--bf16", "--memory-efficient-bf16")


def _unneeded() -> Optional[str]:
    return "torch_xla is installed" if importlib.util.find_spec("torch_xla") is not None else None


def without_tpu(parse_args_and_arch: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``options.parse_args_and_arch`` so that ``--bf16`` does not imply ``--tpu``.

    Args:
        parse_args_and_arch: fairseq's function.

    Returns:
        A function of the same signature. It raises ConfigurationError for both kinds of half
        precision, of which fairseq says that TPUs have one.
    """

    @functools.wraps(parse_args_and_arch)
    def parse_without_tpu(parser: Any, input_args: Any = None, *more: Any, **kwargs: Any) -> Any:
        given = sys.argv[1:] if input_args is None else input_args
        if {*_FP16} & {*given} and {*_BF16} & {*given}:
            raise ConfigurationError(
                "one of --fp16 and --bf16",
                " and ".join(flag for flag in (*_FP16, *_BF16) if flag in given),
                "Drop one of them.",
            )
        parsed = parse_args_and_arch(parser, input_args, *more, **kwargs)
        args = parsed[0] if isinstance(parsed, tuple) else parsed
        # fairseq-validate and fairseq-generate parse once more without defaults: no attribute then.
        if getattr(args, "bf16", False) and "--tpu" not in given:
            args.tpu = False
        return parsed

    return parse_without_tpu


PATCH = Patch(
    name="bf16 without TPU",
    reason="--bf16 switches to TPU training, which fails without torch_xla, on a GPU too.",
    install=replaces({"fairseq.options:parse_args_and_arch": without_tpu}),
    unneeded=_unneeded,
)
