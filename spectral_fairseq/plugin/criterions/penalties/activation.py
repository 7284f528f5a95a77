"""Penalties that a recurrent model computes on its own activations: AR and TAR.

Merity, McCann, Socher: "Revisiting Activation Regularization for Language RNNs", 2017,
https://arxiv.org/abs/1708.01009. They need activations that only the forward pass has, so the model
returns them, weighted by flags of its own, as ``extra["activation_penalties"]``.
"""

from __future__ import annotations

from typing import Any, List

from spectral_fairseq.plugin.criterions.penalties.penalty import Term

ACTIVATION_NAMES = ("activation", "temporal_activation")


def reported_terms(net_output: Any) -> List[Term]:
    """The terms in a model's output; none for most models."""
    extra = net_output[1] if len(net_output) > 1 else None
    reported = extra.get("activation_penalties") if isinstance(extra, dict) else None
    return [Term(name, weight, value) for name, (weight, value) in (reported or {}).items()]
