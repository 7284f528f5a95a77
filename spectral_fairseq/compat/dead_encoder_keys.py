"""Checkpoints of fairseq 0.12.2 load in other versions, without the dead copies of weights."""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, Optional

from spectral_fairseq.compat.patching import Patch, replaces, wrapping

DEAD = (
    "in_proj_weight",
    "in_proj_bias",
    "out_proj_weight",
    "out_proj_bias",
    "fc1_weight",
    "fc1_bias",
    "fc2_weight",
    "fc2_bias",
)


def _unneeded() -> Optional[str]:
    from fairseq.modules.transformer_layer import TransformerEncoderLayerBase

    has_them = "_load_from_state_dict" in vars(TransformerEncoderLayerBase)
    return "this fairseq has these parameters itself" if has_them else None


@wrapping
def drop_dead_keys(
    self: Any, state_dict: Dict[str, Any], name: str, *, original: Callable[..., None]
) -> None:
    """Wrap an encoder layer's ``upgrade_state_dict_named``.

    The keys of all layers of the same stack are dropped at once: with --encoder-layers-to-keep
    the checkpoint has more layers than the model.
    """
    stack = re.escape(name.rpartition(".")[0])
    dead = re.compile(rf"{stack}\.\d+\.({'|'.join(DEAD)})")
    for key in [key for key in state_dict if dead.fullmatch(key)]:
        del state_dict[key]
    original(self, state_dict, name)


DEAD_ENCODER_KEYS = Patch(
    name="dead encoder keys",
    reason="Checkpoints of fairseq 0.12.2 hold eight unused tensors for each encoder layer (copies "
    "for a fast path), which other versions refuse as unexpected keys.",
    install=replaces(
        {
            "fairseq.modules.transformer_layer:TransformerEncoderLayerBase"
            ".upgrade_state_dict_named": drop_dead_keys
        }
    ),
    unneeded=_unneeded,
)
