"""What a penalty is: one declaration, from which its flags, checks, values and logs follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Tuple

from torch import Tensor

from spectral_fairseq.plugin.criterions.penalties.needs import ModelView, Need, Words
from spectral_fairseq.plugin.flags import Flag


@dataclass(frozen=True)
class Penalty:
    """A term ``weight * R`` of the objective, R a function of the model's parameters.

    Args:
        name: key of R in the training logs.
        weight: flag of the weight; a weight of 0 costs nothing. A flag that parses to several
            numbers weighs the parts of R, which then enters the objective as it is.
        needs: what R is computed from, one of :mod:`needs`; it refuses models that lack it.
        value: R, a scalar, from what ``needs`` found and the options: the parsed values of all
            flags of this penalty, by name. Called in float32, outside autocast.
        settings: further flags.
        for_words: completes the options for a dictionary; called once for each dictionary.
        lazy: whether R of a model is computed every k-th update only; see Note [Lazy penalties].
    """

    name: str
    weight: Flag
    needs: Need
    value: Callable[[Any, Any], Tensor]
    settings: Tuple[Flag, ...] = ()
    for_words: Callable[[Any, Words], Any] = lambda options, _: options
    lazy: Callable[[ModelView], bool] = lambda _: True

    @property
    def flags(self) -> Tuple[Flag, ...]:
        """All flags of this penalty."""
        return (self.weight, *self.settings)

    def factor(self, options: Any) -> float:
        """The factor of R in the objective; 0 if the penalty is off."""
        weight = getattr(options, self.weight.name)
        return float(any(weight)) if isinstance(weight, tuple) else weight


class Term(NamedTuple):
    """One term of the objective at one update.

    Args:
        name: key in the training logs.
        weight: the factor of ``value``.
        value: R, a float32 scalar.
    """

    name: str
    weight: float
    value: Tensor
