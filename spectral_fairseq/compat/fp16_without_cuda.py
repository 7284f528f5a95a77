"""``--fp16`` without a GPU ends in an error that names the flags that work."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch

from spectral_fairseq.compat.patching import Outcome, is_ours, mended, not_needed, replace
from spectral_fairseq.errors import UnsupportedError

NAME = "fp16 without CUDA"
DEFECT = "--fp16 without a GPU fails inside the optimiser with an error about CUDA's devices."


def apply() -> Outcome:
    """Refuse flattened fp16 parameters where there is no CUDA device."""
    from fairseq.optim import fp16_optimizer

    if torch.cuda.is_available():
        return not_needed("there is a CUDA device")
    mixin = fp16_optimizer._FP16OptimizerMixin
    if is_ours(mixin.build_fp32_params):
        return not_needed("done before in this process")
    replace(mixin, "build_fp32_params", refuse_flattening, classmethod)
    return mended("the error says which flags train in half precision on a CPU")


def refuse_flattening(build_fp32_params: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function of the classmethod ``_FP16OptimizerMixin.build_fp32_params``.

    Args:
        build_fp32_params: the host's function, which takes the class first.

    Returns:
        A function of the same signature.
    """

    @functools.wraps(build_fp32_params)
    def build_or_refuse(cls: Any, args: Any, params: Any, flatten: bool = True) -> Any:
        if flatten:
            raise UnsupportedError(
                "a CUDA device for --fp16",
                "none",
                "Train without --fp16 on a CPU, or add --fp16-no-flatten-grads, or use --bf16.",
            )
        return build_fp32_params(cls, args, params, flatten)

    return build_or_refuse
