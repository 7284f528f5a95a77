"""Stock fairseq's checkpoints load where its dead encoder parameters do not exist."""

from __future__ import annotations

import functools
import re
from typing import Any, Callable, Dict

from spectral_fairseq.compat.patching import Outcome, is_ours, mended, not_needed, replace

NAME = "dead encoder keys"
DEFECT = (
    "checkpoints of stock fairseq 0.12.2 hold eight unused tensors for each encoder layer "
    "(copies for a fast path), on which other versions fail as unexpected keys."
)

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


def apply() -> Outcome:
    """Drop the dead keys while encoder layers upgrade a state dict."""
    from fairseq.modules.transformer_layer import TransformerEncoderLayerBase

    if "_load_from_state_dict" in vars(TransformerEncoderLayerBase):
        return not_needed("this fairseq has these parameters itself")
    if is_ours(TransformerEncoderLayerBase.upgrade_state_dict_named):
        return not_needed("done before in this process")
    replace(TransformerEncoderLayerBase, "upgrade_state_dict_named", drop_dead_keys)
    return mended("TransformerEncoderLayerBase.upgrade_state_dict_named drops them")


def drop_dead_keys(upgrade: Callable[..., None]) -> Callable[..., None]:
    """Wrap an encoder layer's ``upgrade_state_dict_named``.

    All layers of the same stack are cleaned at once: with --encoder-layers-to-keep the checkpoint
    has more of them than the model.

    Args:
        upgrade: the host's method.

    Returns:
        A method of the same signature.
    """

    @functools.wraps(upgrade)
    def upgrade_without_dead_keys(self: Any, state_dict: Dict[str, Any], name: str) -> None:
        stack = re.escape(name.rpartition(".")[0])
        dead = re.compile(rf"{stack}\.\d+\.({'|'.join(DEAD)})")
        for key in [key for key in state_dict if dead.fullmatch(key)]:
            del state_dict[key]
        upgrade(self, state_dict, name)

    return upgrade_without_dead_keys
