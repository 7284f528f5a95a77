"""Terms that a model of transformers adds to the loss of its tokens."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, Optional, Union

from torch import Tensor, nn

from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.training.hidden_states import HiddenStates


class OtherLosses(NamedTuple):
    """The load-balancing loss of a mixture of experts, which transformers adds beside labels only.

    Attributes:
        coefficient: its weight.
        asked: whether the model's settings ask for it; it can be asked for in a call as well.
    """

    coefficient: float
    asked: bool

    @classmethod
    def of(cls, model: nn.Module) -> Optional[OtherLosses]:
        """That of a model; ``None`` if it has no such loss.

        Raises:
            UnsupportedError: the model's settings ask for a further loss, which is not known here.
        """
        config = getattr(model, "config", None)
        places = [model, config, *(getattr(config, name, None) for name in _PARTS_OF_CONFIG)]
        asked = any(getattr(place, "output_router_logits", False) for place in places)
        code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
        names = () if code is None else code.co_varnames
        others = [name for name in names if name.endswith(("aux_loss", "z_loss"))]
        found = [getattr(place, name, None) for place in places for name in _COEFFICIENTS]
        known = next((float(one) for one in found if isinstance(one, (int, float))), None)
        if asked and others and (known is None or others != ["aux_loss"]):
            raise UnsupportedError(
                "a model whose loss is that of its tokens, with the `aux_loss` of its experts",
                f"a {type(model).__name__}, which adds {', '.join(others)}",
                "Set model.config.output_router_logits = False, or use the model's own loss.",
            )
        return None if known is None or "aux_loss" not in others else cls(known, asked)

    def __call__(self, outputs: Any) -> Union[Tensor, float]:
        """The weighted loss of a batch."""
        found = getattr(outputs, "aux_loss", None)
        if found is not None:
            weighted: Tensor = self.coefficient * found
            return weighted
        if self.asked and isinstance(outputs, (tuple, Tensor, HiddenStates)):
            raise ConfigurationError(
                "outputs with the `aux_loss` of the experts, which the model's settings ask for",
                f"a {type(outputs).__name__}",
                "Pass the outputs of the model as they are, with return_dict=True.",
            )
        return 0.0


_PARTS_OF_CONFIG = ("text_config", "ffn_config")
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
