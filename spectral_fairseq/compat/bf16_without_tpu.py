"""``--bf16`` on a GPU or CPU, not only on a TPU."""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import Any, Callable

from spectral_fairseq.compat.patching import Outcome, is_ours, mended, not_needed, replace

NAME = "bf16 without TPU"
DEFECT = "--bf16 switches to TPU training, which fails without torch_xla, on a GPU too."


def apply() -> Outcome:
    """Leave TPU training to those who ask for it."""
    from fairseq import options

    if importlib.util.find_spec("torch_xla") is not None:
        return not_needed("torch_xla is installed")
    if is_ours(options.parse_args_and_arch):
        return not_needed("done before in this process")
    replace(options, "parse_args_and_arch", without_tpu)
    return mended("--bf16 no longer implies --tpu, as torch_xla is not installed")


def without_tpu(parse_args_and_arch: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``options.parse_args_and_arch``.

    Args:
        parse_args_and_arch: the host's function.

    Returns:
        A function of the same signature.
    """

    @functools.wraps(parse_args_and_arch)
    def parse_without_tpu(parser: Any, input_args: Any = None, *more: Any, **kwargs: Any) -> Any:
        parsed = parse_args_and_arch(parser, input_args, *more, **kwargs)
        args = parsed[0] if isinstance(parsed, tuple) else parsed
        given = sys.argv[1:] if input_args is None else input_args
        # fairseq-validate and fairseq-generate parse once more without defaults: no attribute then.
        if getattr(args, "bf16", False) and "--tpu" not in given:
            args.tpu = False
        return parsed

    return parse_without_tpu
