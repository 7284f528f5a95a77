"""Optimiser ``muon``: Muon for the hidden matrices, Adam or Coupled Adam for everything else."""

# No "from __future__ import annotations" here: fairseq and omegaconf read the field types.
import logging
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Dict, List

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II

from spectral_fairseq.errors import arguments_as_flags
from spectral_fairseq.lm.muon import ADJUSTMENTS, Muon, hidden_matrices
from spectral_fairseq.options import option
from spectral_fairseq.plugin.optim.coupled_adam import (
    CoupledTables,
    stepped_for,
    table_parameters,
    two_numbers,
)

logger = logging.getLogger(__name__)

TABLES = ("adam", "coupled_adam")
_Adjustments: Any = ChoiceEnum(ADJUSTMENTS)
_Tables: Any = ChoiceEnum(TABLES)


@dataclass
class MuonConfig(FairseqDataclass):
    """Flags of the optimiser: its own, and those of fairseq's ``adam`` that apply."""

    muon_momentum: float = option(0.95, "momentum of the matrices that Muon steps")
    muon_adjust_lr: _Adjustments = option(
        ADJUSTMENTS[0],
        "factor on the learning rate of these matrices: match_rms_adamw makes their steps as large "
        "as those of Adam, so that its rate can be kept",
    )
    muon_tables: _Tables = option(TABLES[0], "how the tables are trained")
    adam_betas: Any = option("(0.9, 0.999)", "decay rates of the two moments")
    adam_eps: float = option(1e-8, "added to the root of the second moment")
    weight_decay: float = option(0.0, "weight decay, decoupled from the gradient")
    lr: List[float] = II("optimization.lr")


@register_optimizer("muon", dataclass=MuonConfig)
class FairseqMuon(FairseqOptimizer):
    """Muon for the matrices that are no tables, on ``torch.optim.Muon``; Adam for the rest.

    Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/. :class:`MuonMatrices` names the
    matrices before the first step.

    Args:
        cfg: the flags.
        params: the parameters to train.
    """

    def __init__(self, cfg: MuonConfig, params: Any) -> None:
        super().__init__(cfg)
        flags = {"momentum": "--muon-momentum", "adjust_lr_fn": "--muon-adjust-lr"}
        with arguments_as_flags(**flags):
            self._optimizer = Muon(
                params,
                momentum=cfg.muon_momentum,
                adjust_lr_fn=_text(cfg.muon_adjust_lr),
                **self.optimizer_config,
            )

    @property
    def optimizer_config(self) -> Dict[str, Any]:
        """Keyword arguments that belong to groups of parameters."""
        return {
            "lr": self.cfg.lr[0],
            "betas": two_numbers(self.cfg.adam_betas),
            "eps": self.cfg.adam_eps,
            "weight_decay": self.cfg.weight_decay,
        }


def _text(choice: Any) -> str:
    return str(getattr(choice, "value", choice))


class MuonMatrices(CoupledTables):
    """Names the hidden matrices to a ``muon``, and the tables where they are to be coupled."""

    kind = Muon
    flag = "--optimizer muon"
    _told = False

    def name_parameters(self) -> None:
        """Name them, and say in the log which parameters Muon steps."""
        optimizer, model = self.trainer.optimizer, self.trainer.get_model()
        matrices = hidden_matrices(model, table_parameters(model))
        optimizer.optimizer.take(stepped_for(optimizer, list(matrices.values()), self.flag))
        coupled = _text(self.trainer.cfg.optimizer.muon_tables) == "coupled_adam"
        if coupled:
            super().name_parameters()
        if self._told:
            return
        self._told = True
        kinds = Counter(re.sub(r"\d+", "*", name) for name in matrices)
        weights = sum(one.numel() for one in matrices.values())
        logger.info(
            "Muon steps %d matrices of %d weights: %s; Adam steps all other parameters, and %s",
            len(matrices),
            weights,
            ", ".join(f"{name} ({count})" for name, count in kinds.items()) or "none",
            "couples the second moments of tables" if coupled else "treats tables like them",
        )
