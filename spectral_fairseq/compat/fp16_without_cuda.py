"""``--fp16`` without a GPU ends in an error that names the flags that work.

This patch only changes an error message. It is worth its lines because the cure cannot be guessed:
half precision does train on a CPU with ``--fp16-no-flatten-grads``, while fairseq's own error comes
from inside the optimizer and speaks of CUDA devices.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional

import torch

from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.errors import UnsupportedError


def _unneeded() -> Optional[str]:
    return "there is a CUDA device" if torch.cuda.is_available() else None


def refuse_flattening(build_fp32_params: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function of the classmethod ``_FP16OptimizerMixin.build_fp32_params``.

    Args:
        build_fp32_params: fairseq's function, which takes the class first.

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


PATCH = Patch(
    name="fp16 without CUDA",
    reason="--fp16 without a GPU fails inside the optimizer with an error about CUDA devices.",
    install=replaces(
        {"fairseq.optim.fp16_optimizer:_FP16OptimizerMixin.build_fp32_params": refuse_flattening}
    ),
    unneeded=_unneeded,
)
