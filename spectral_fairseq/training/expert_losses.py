"""The load-balancing loss of a mixture of experts, which transformers adds beside labels only."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, Optional, Sequence, Tuple, Union

from torch import Tensor, nn

from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.training.hidden_states import HiddenStates

# What outputs have where a call asks for the losses of the experts.
_ROUTED = ("router_logits", "encoder_router_logits", "decoder_router_logits")
_PARTS_OF_CONFIG = ("text_config", "ffn_config")
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")


class ExpertLosses(NamedTuple):
    """The load-balancing loss of a mixture of experts, which transformers adds beside labels only.

    Attributes:
        coefficient: its weight, if it is known.
        asked: whether the model's settings ask for it; it can be asked for in a call as well.
        model: name of the model's class.
        terms: names of the terms that it adds.
    """

    coefficient: Optional[float]
    asked: bool
    model: str
    terms: Tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Optional[ExpertLosses]:
        """That of a model; ``None`` if it adds no such loss.

        Raises:
            UnsupportedError: the model's settings ask for a further loss, which is not known here.
        """
        config = getattr(model, "config", None)
        places = [model, config, *(getattr(config, name, None) for name in _PARTS_OF_CONFIG)]
        asked = any(getattr(place, "output_router_logits", False) for place in places)
        code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
        names = () if code is None else code.co_varnames
        others = [name for name in names if name.endswith(("aux_loss", "z_loss"))]
        coefficients = [getattr(place, name, None) for place in places for name in _COEFFICIENTS]
        known = next(
            (float(value) for value in coefficients if isinstance(value, (int, float))), None
        )
        if asked and others and (known is None or others != ["aux_loss"]):
            raise _unknown(type(model).__name__, others)
        return cls(known, asked, type(model).__name__, tuple(others)) if others else None

    def __call__(self, outputs: Any) -> Union[Tensor, float]:
        """The weighted loss of a batch.

        Raises:
            ConfigurationError: outputs without the loss that the settings ask for.
            UnsupportedError: a call asked for losses that are not known here.
        """
        aux_loss = getattr(outputs, "aux_loss", None)
        if aux_loss is not None and self.coefficient is not None:
            weighted: Tensor = self.coefficient * aux_loss
            return weighted
        routed = any(getattr(outputs, name, None) is not None for name in _ROUTED)
        if aux_loss is not None or routed:
            raise _unknown(self.model, self.terms)
        if self.asked and isinstance(outputs, (tuple, Tensor, HiddenStates)):
            wanted = (
                "outputs with the `aux_loss` of the experts, which the model's settings ask for"
            )
            remedy = "Pass the outputs of the model as they are, with return_dict=True."
            raise ConfigurationError(wanted, f"a {type(outputs).__name__}", remedy)
        return 0.0


def _unknown(model: str, terms: Sequence[str]) -> UnsupportedError:
    return UnsupportedError(
        "a model whose loss is that of its tokens, with the `aux_loss` of its experts",
        f"a {model}, which adds {', '.join(terms)}",
        "Set model.config.output_router_logits = False, or use the model's own loss.",
    )
