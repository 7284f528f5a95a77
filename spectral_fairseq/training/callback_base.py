"""What callbacks of all frameworks have in common: the control, measures, and their loss."""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence

from torch import Tensor

from spectral_fairseq.errors import ConfigurationError, SpectralFairseqError, UnsupportedError
from spectral_fairseq.training.control import SpectrumControl
from spectral_fairseq.training.factored_layers import whole_weight
from spectral_fairseq.training.output_layer import without_wrappers
from spectral_fairseq.training.table_checks import check_trained
from spectral_fairseq.training.token_loss import TokenLoss

STEP_YOURSELF = "Call SpectrumControl.step after each step of the optimiser yourself"


def never_called(hook: str, trainer: Any) -> UnsupportedError:
    """The error for a trainer that takes steps without a hook of its callbacks."""
    return UnsupportedError(
        f"a trainer that calls {hook} of its callbacks",
        f"{type(trainer).__name__}, which has taken a step without it",
        f"{STEP_YOURSELF}.",
    )


def called_once(found: str, remedy: str) -> ConfigurationError:
    """The error for a control that would count each step of the optimiser twice."""
    wanted = "a control that is called once after each step of the optimiser"
    return ConfigurationError(wanted, found, remedy)


def measures_of(model: Any, loss: Optional[TokenLoss], is_first: bool) -> Dict[str, float]:
    """What is logged of a step: the measures of the output table, and the means of the loss.

    Every worker has to call this.

    Args:
        model: or its table; a method of this package may be on it.
        loss: with which it is trained, if that is one of this package.
        is_first: whether this is the worker that logs; the others get nothing.
    """
    try:
        table: Any = model if isinstance(model, Tensor) else whole_weight(model)
    except SpectralFairseqError:  # the analysis knows more layouts, and warns where it knows none
        table = model
    means = {} if loss is None else loss.means(of_all_workers=True)
    if not is_first:
        return {}
    from spectral_fairseq.analysis import training_measures

    measures = {f"table/{name}": value for name, value in training_measures(table).items()}
    return {**measures, **means}


def loss_of(model: Any) -> Optional[TokenLoss]:
    """The loss of this package that a model of transformers computes of its labels."""
    function = None if model is None else getattr(without_wrappers(model), "loss_function", None)
    loss = getattr(function, "loss", None)
    return loss if isinstance(loss, TokenLoss) else None


_Framework: Any = object  # to a type checker, the base class of any framework


class CallbackBase(_Framework):  # type: ignore[misc]
    """The control of a callback, and the model that it is of."""

    control: Optional[SpectrumControl]
    measure_every: int
    plain_at_end: bool
    _takes_model: bool

    def is_measured(self, step: int) -> bool:
        """Whether what is logged is measured after a step."""
        return bool(self.measure_every) and step % self.measure_every == 0

    def take(self, model: Any, callbacks: Sequence[Any]) -> None:
        """Bind the control to the model that is trained, or see that it is.

        Args:
            model: that is trained.
            callbacks: all of the trainer.

        Raises:
            ConfigurationError: it is of another model, or several of the callbacks step it.
        """
        if self.control is None:
            return
        if sum(getattr(one, "control", None) is self.control for one in callbacks) > 1:
            remedy = "Give the callback once, and each callback a SpectrumControl of its own."
            raise called_once("one that several callbacks of the trainer have", remedy)
        if self._takes_model:
            self.control.bind(model)
        check_trained(self.control.weight, model, "SpectrumControl")
