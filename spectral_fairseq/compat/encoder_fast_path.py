"""Encoders of fairseq 0.12.2 do not take their fast path, which newer versions of torch refuse.

In evaluation they would call ``torch._transformer_encoder_layer_fwd`` without saying what kind of
mask they give, which torch 1.13 and later refuse for every batch with padding. Their usual way of
computing a layer gives the same result; later versions of fairseq have no other.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

from spectral_fairseq.compat.patching import Patch, replaces, wrapping
from spectral_fairseq.provenance import torch_release

_LAYER = "fairseq.modules.transformer_layer:TransformerEncoderLayerBase"


def _unneeded_encoder_fast_path() -> Optional[str]:
    from fairseq.modules.transformer_layer import TransformerEncoderLayerBase

    if "_load_from_state_dict" not in vars(TransformerEncoderLayerBase):
        return "this fairseq has no fast path of its own"
    return "this torch takes the mask as it is" if torch_release() < (1, 13) else None


@wrapping
def without_fast_path(self: Any, *args: Any, original: Callable[..., None], **kwargs: Any) -> None:
    """Wrap an encoder layer's ``__init__``."""
    original(self, *args, **kwargs)
    self.can_use_fastpath = False


ENCODER_FAST_PATH = Patch(
    name="encoder fast path",
    reason="Evaluating or translating with a Transformer of fairseq 0.12.2 fails under torch "
    ">= 1.13 with 'Mask Type should be defined'.",
    install=replaces({f"{_LAYER}.__init__": without_fast_path}),
    unneeded=_unneeded_encoder_fast_path,
)
