"""A model that keeps some layers of another can be trained, saved and loaded (LayerDrop).

Fan, Grave, Joulin: "Reducing Transformer Depth on Demand with Structured Dropout", ICLR 2020,
https://arxiv.org/abs/1909.11556. With ``--encoder-layers-to-keep 0,2`` fairseq builds two layers
and takes their weights from layers 0 and 2 of the checkpoint that it loads. Four things go wrong:

- The flag of ``transformer`` is declared as a list, and the models read a text.
- The number of layers is written into a copy of the settings, so that a checkpoint of the smaller
  model, which no longer says which layers to keep, still says that it has all of them.
- A smaller model is cut once more when its own training is resumed.
- Where one side alone is cut, the other loses all its layers.
"""

from __future__ import annotations

import contextlib
import functools
import re
from argparse import Namespace
from typing import Any, Callable, Dict, List, Mapping, Optional

from omegaconf import OmegaConf, open_dict

from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.errors import ConfigurationError

_SIDES = ("encoder", "decoder")


def _layers(state_dict: Mapping[str, Any], side: str) -> List[int]:
    """The numbers of the layers whose weights are there, by the pattern of fairseq."""
    found = (re.match(rf"{side}.*\.layers\.(\d+)\.", key) for key in state_dict)
    return sorted({int(match[1]) for match in found if match})


def _kept(settings: Any, side: str) -> Optional[List[int]]:
    """The layers to keep in ascending order; None stands for all."""
    values = vars(settings) if isinstance(settings, Namespace) else settings
    name = f"{side}_layers_to_keep"
    given = values.get(name)
    if given is None or given == "":
        return None
    try:
        kept = sorted(int(number) for number in str(given).strip("[]").split(","))
    except ValueError:
        kept = []
    if not kept or kept[0] < 0 or len(set(kept)) < len(kept):
        raise ConfigurationError(
            f"--{name.replace('_', '-')} to be different numbers of layers from 0, such as 0,2",
            repr(given),
            "Correct it.",
        )
    return kept


def _say_what_is_kept(settings: Any, side: str, number: int) -> None:
    """Make the settings those of a model that has ``number`` layers and keeps all of them."""
    values = vars(settings) if isinstance(settings, Namespace) else settings
    with open_dict(values) if OmegaConf.is_config(values) else contextlib.nullcontext():
        values[f"{side}_layers"] = number
        values[f"{side}_layers_to_keep"] = None


def pruning_once(prune_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``prune_state_dict``, which every model calls on the weights that it loads.

    Args:
        prune_state_dict: fairseq's function.

    Returns:
        A function of the same signature.

    Raises:
        ConfigurationError: layers to keep that the weights do not have, from the function.
    """

    @functools.wraps(prune_state_dict)
    def prune_sides(state_dict: Dict[str, Any], model_cfg: Any) -> Dict[str, Any]:
        kept = {} if model_cfg is None else {side: _kept(model_cfg, side) for side in _SIDES}
        pruning = {}
        for side, layers in kept.items():
            there = _layers(state_dict, side)
            if layers is None or len(there) == len(layers):  # as many as the model has
                pruning[side] = there
                continue
            absent = sorted(set(layers) - set(there))
            if absent:
                raise ConfigurationError(
                    f"--{side}-layers-to-keep to name layers of the checkpoint, which has "
                    f"{len(there)}",
                    f"layer {absent[0]}",
                    "Count the layers from 0.",
                )
            pruning[side] = layers
        if any(kept.values()):
            names = {f"{side}_layers_to_keep": ",".join(map(str, pruning[side])) for side in kept}
            state_dict = prune_state_dict(state_dict, Namespace(arch="", **names))
        for side, layers in kept.items():
            if layers is not None:
                _say_what_is_kept(model_cfg, side, len(layers))
        return state_dict

    return prune_sides


def saying_what_is_kept(state_dict: Callable[[Any], Dict[str, Any]]) -> Callable[..., Any]:
    """Wrap ``Trainer.state_dict``: a model that was trained anew with the flag loads no weights."""

    @functools.wraps(state_dict)
    def state_dict_as_built(self: Any) -> Dict[str, Any]:
        state = state_dict(self)
        settings = state["cfg"]["model"]
        for side in _SIDES:
            kept = _kept(settings, side)
            if kept is not None and len(_layers(state["model"], side)) == len(kept):
                _say_what_is_kept(settings, side, len(kept))
        return state

    return state_dict_as_built


def _install() -> str:
    from fairseq.models.transformer.transformer_config import DecoderConfig, EncDecBaseConfig

    for config in (EncDecBaseConfig, DecoderConfig):
        config.__dataclass_fields__["layers_to_keep"].type = Optional[str]
    return (
        "declares layers_to_keep as a text, and "
        + replaces(
            {
                "fairseq.checkpoint_utils:prune_state_dict": pruning_once,
                "fairseq.trainer:Trainer.state_dict": saying_what_is_kept,
            }
        )()
    )


PATCH = Patch(
    name="kept layers",
    reason="A training with --encoder-layers-to-keep or --decoder-layers-to-keep fails at its "
    "start, or saves checkpoints that nothing can load.",
    install=_install,
)
