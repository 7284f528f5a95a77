"""Refuses, before training, what fairseq's quantisation would leave without effect.

``--quantization-config-path`` replaces layers when the first epoch begins and between its stages. A
feature that kept the old layer would act on parameters that the model no longer has.
``--quant-noise-scalar`` lets an output layer compute its scores from a quantised copy of its table.
"""

from __future__ import annotations

from typing import Any, List

from fairseq.modules.quantization.pq.utils import get_layers
from fairseq.modules.quantization.scalar.modules import IntLinear

from spectral_fairseq import refusals
from spectral_fairseq.embeddings import Table
from spectral_fairseq.heads import Head
from spectral_fairseq.plugin.criterion import Objective, objectives_in
from spectral_fairseq.plugin.likelihood import LOSS_FORM

_FLAG = "--quantization-config-path"


def check_quantisation(trainer: Any) -> None:
    """Refuse what quantisation would leave without effect, or end later; before the first epoch.

    Raises:
        UnsupportedError: a layer to be replaced that something holds; an optimiser to be built anew
            that has to last; or scores that would not be those of the output layer.
    """
    quantizer = getattr(trainer, "quantizer", None)
    if quantizer is not None:
        _check_optimizer(trainer)
        _check_layers(trainer, quantizer.layers_to_quantize)
    for objective in objectives_in(trainer):
        flag = _flag_of_own_scores(objective)
        if flag:
            refusals.QUANTISED_SCORES.check(trainer.cfg, flag)


def _check_optimizer(trainer: Any) -> None:
    name = str(getattr(trainer.cfg.optimizer, "_name", ""))
    if name in ("muon", "nt_asgd"):
        raise refusals.REBUILT_OPTIMIZER.error(_FLAG, f"--optimizer {name}")


def _check_layers(trainer: Any, patterns: List[str]) -> None:
    model = trainer.get_model()
    modules = dict(model.named_modules())
    names = [name for pattern in patterns for name in get_layers(model, pattern)]
    for name in names:
        parts = name.split(".")
        owners = (modules.get(".".join(parts[:end])) for end in range(1, len(parts) + 1))
        for owner in owners:
            if isinstance(owner, (Table, Head)):
                _refuse(name, f"a {type(owner).__name__}")
    replaced = {name: modules[name] for name in names if name in modules}
    for objective in objectives_in(trainer):
        table = objective.control.table
        if table is None:
            continue
        for name, module in replaced.items():
            if any(parameter is table for parameter in module.parameters(recurse=False)):
                _refuse(name, objective.control.flag)


def _refuse(name: str, ours: str) -> None:
    raise refusals.REPLACED_LAYERS.error(f"{_FLAG} that replaces {name}", ours)


def _flag_of_own_scores(objective: Objective) -> str:
    """The flag for which scores are computed beside fairseq's output layer; empty without one."""
    term = objective.likelihood
    if not isinstance(term.head, IntLinear):  # of tied tables fairseq quantises the look-up alone
        return ""
    if term.makes_scores:
        return term.flag
    return f"{LOSS_FORM.flag} blockwise" if objective.form.blockwise else ""
