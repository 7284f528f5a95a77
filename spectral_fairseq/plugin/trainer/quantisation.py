"""What fairseq's quantisation takes from under a feature is refused before training.

``--quantization-config-path`` replaces layers when the first epoch begins and between its stages:
what a feature holds of the layer before is then no part of the model, and its work has no effect.
``--quant-noise-scalar`` lets an output layer compute its scores from a quantised copy of its table.
"""

from __future__ import annotations

from typing import Any, Iterator, List, Set, Tuple

from fairseq.modules.quantization.pq.utils import get_layers
from fairseq.modules.quantization.scalar.modules import IntLinear

from spectral_fairseq import refusals
from spectral_fairseq.embeddings import Table
from spectral_fairseq.heads import Head
from spectral_fairseq.plugin.criterion import Objective, PenalisedCrossEntropy
from spectral_fairseq.plugin.likelihood.consistency import Consistency
from spectral_fairseq.plugin.likelihood.gradient_gating import GRADIENT_GATING, GradientGating
from spectral_fairseq.plugin.likelihood.plain import LOSS_FORM
from spectral_fairseq.plugin.models.tables import TABLE_LR_SCALE, TABLE_WEIGHT_DECAY
from spectral_fairseq.plugin.optim.coupled_adam import table_parameters
from spectral_fairseq.plugin.penalties.view import ModelView
from spectral_fairseq.plugin.trainer.groups import table_options

_FLAG = "--quantization-config-path"


def check_quantisation(trainer: Any) -> None:
    """Refuse what quantisation would leave without effect, or end later.

    Args:
        trainer: fairseq's, before its first epoch.

    Raises:
        UnsupportedError: a layer to be replaced that something holds; an optimiser to be built anew
            that has to last; or scores that would not be those of the output layer.
    """
    quantizer = getattr(trainer, "quantizer", None)
    if quantizer is not None:
        _check_optimizer(trainer, quantizer)
        _check_layers(trainer, quantizer.layers_to_quantize)
    for one in _objectives(trainer):
        flag = _flag_of_own_scores(one)
        if flag:
            refusals.QUANTISED_SCORES.check(trainer.cfg, flag)


def _objectives(trainer: Any) -> List[Objective]:
    criterion = trainer.get_criterion()
    if not isinstance(criterion, PenalisedCrossEntropy):
        return []
    return criterion.objectives_of(trainer.get_model())


def _optimizer_of(trainer: Any) -> str:
    return str(getattr(trainer.cfg.optimizer, "_name", ""))


def _check_optimizer(trainer: Any, quantizer: Any) -> None:
    name = _optimizer_of(trainer)
    # Between epochs coupled_adam is told its tables again.
    within_epochs = getattr(quantizer, "update_schedule", None) is not None
    if name in ("muon", "nt_asgd") or (name == "coupled_adam" and within_epochs):
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
    for flag, held in _held(trainer):
        for name, module in replaced.items():
            if held & {id(module), *map(id, module.parameters(recurse=False))}:
                _refuse(name, flag)


def _refuse(name: str, ours: str) -> None:
    raise refusals.REPLACED_LAYERS.error(f"{_FLAG} that replaces {name}", ours)


def _held(trainer: Any) -> Iterator[Tuple[str, Set[int]]]:
    """Flags, and the ids of the parameters or modules that they hold on to."""
    model = trainer.get_model()
    if _optimizer_of(trainer) == "coupled_adam":
        yield "--optimizer coupled_adam", _ids(table_parameters(model))
    objectives = _objectives(trainer)
    if objectives:
        own = table_options(trainer.cfg, model, trainer.task).parameters
        yield f"{TABLE_LR_SCALE.flag} or {TABLE_WEIGHT_DECAY.flag}", _ids(own)
    for one in objectives:
        for table in one.control.controlled(ModelView(one.parts)):
            yield table.flag, _ids([table.parameter])
        if isinstance(one.likelihood, Consistency) and not one.likelihood.symmetric:
            yield one.likelihood.flag, _ids(one.likelihood.look_ups)


def _ids(held: Any) -> Set[int]:
    return {id(one) for one in held}


def _flag_of_own_scores(one: Objective) -> str:
    """The flag for which scores are computed beside fairseq's output layer; empty without one."""
    term: Any = one.likelihood
    if not isinstance(term.head, IntLinear):  # of tied tables fairseq quantises the look-up alone
        return ""
    if isinstance(term, GradientGating):
        return GRADIENT_GATING.flag
    if isinstance(term, Consistency) and term.blockwise:
        return term.flag
    return f"{LOSS_FORM.flag} blockwise" if one.form.blockwise else ""
