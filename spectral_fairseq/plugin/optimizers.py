"""Optimisers ``coupled_adam`` and ``muon``.

``coupled_adam`` is fairseq's Adam with one second moment for all rows of a table. ``muon`` steps
the hidden matrices by Muon, and everything else by Adam or Coupled Adam.
"""

# No "from __future__ import annotations" here: fairseq and omegaconf read the field types.
import ast
import logging
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Dict, List, Tuple, Type

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import FairseqDecoder
from fairseq.modules import AdaptiveSoftmax, LearnedPositionalEmbedding
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II
from torch import Tensor, nn

from spectral_fairseq import refusals
from spectral_fairseq.compat.resuming import float32_copies
from spectral_fairseq.embeddings import Table
from spectral_fairseq.errors import ConfigurationError, arguments_as_flags, misspelt
from spectral_fairseq.lm.coupled_adam import CoupledAdam
from spectral_fairseq.lm.muon import ADJUSTMENTS, Muon, hidden_matrices_by_name
from spectral_fairseq.options import option
from spectral_fairseq.plugin.find import output_layers
from spectral_fairseq.plugin.listener import Listener

logger = logging.getLogger(__name__)


@dataclass
class CoupledAdamConfig(FairseqDataclass):
    """Flags of the optimiser: those of fairseq's ``adam`` that apply."""

    adam_betas: Any = option("(0.9, 0.999)", "decay rates of the two moments")
    adam_eps: float = option(1e-8, "added to the root of the second moment")
    weight_decay: float = option(0.0, "weight decay, decoupled from the gradient")
    lr: List[float] = II("optimization.lr")


def two_numbers(betas: Any) -> Tuple[float, float]:
    """The decay rates of the moments, of two numbers or their text.

    Raises:
        ConfigurationError: anything else, or a number outside [0, 1).
    """
    try:
        first, second = ast.literal_eval(betas) if isinstance(betas, str) else betas
        if 0 <= first < 1 and 0 <= second < 1:
            return float(first), float(second)
    except (SyntaxError, TypeError, ValueError):
        pass
    raise misspelt("--adam-betas of two numbers from 0 to below 1, such as '(0.9, 0.98)'", betas)


class _WithAdam(FairseqOptimizer):
    """An optimiser of fairseq that has the flags of its ``adam``."""

    @property
    def optimizer_config(self) -> Dict[str, Any]:
        """Keyword arguments of the torch optimiser, which its groups of parameters have too."""
        return {
            "lr": self.cfg.lr[0],
            "betas": two_numbers(self.cfg.adam_betas),
            "eps": self.cfg.adam_eps,
            "weight_decay": self.cfg.weight_decay,
        }


@register_optimizer("coupled_adam", dataclass=CoupledAdamConfig)
class FairseqCoupledAdam(_WithAdam):
    """:class:`CoupledAdam`; before the first step :class:`CoupledTables` names the tables."""

    def __init__(self, cfg: CoupledAdamConfig, params: Any) -> None:
        super().__init__(cfg)
        self._optimizer = CoupledAdam(params, **self.optimizer_config)


def table_parameters(model: nn.Module) -> List[nn.Parameter]:
    """The parameters of a model that have a row for each word, each once.

    These are the matrices of embeddings (of a factored table U or v, whose rows are words) and of
    output layers, tied or not; of fairseq's adaptive softmax the matrix of each cluster. Embeddings
    of positions are no tables.
    """
    tables: List[Any] = []
    for module in model.modules():
        if isinstance(module, LearnedPositionalEmbedding):
            continue
        if isinstance(module, (Table, nn.Embedding)):
            parameters = module.parameters(recurse=False)
            tables.extend(
                p for p in parameters if p.dim() == 2 and p.size(0) == module.num_embeddings
            )
        if isinstance(module, AdaptiveSoftmax):
            clusters = [module.head, *(tail[-1] for tail in module.tail)]
            tables.extend(table.weight for table in clusters if isinstance(table, nn.Linear))
        if isinstance(module, FairseqDecoder):
            for _, weight in output_layers(module):
                if isinstance(weight, nn.Parameter) and len(weight) == len(module.dictionary):
                    tables.append(weight)
    return list({id(table): table for table in tables if table.requires_grad}.values())


def stepped_for(optimizer: Any, parameters: List[nn.Parameter], flag: str) -> List[Tensor]:
    """What a fairseq optimiser steps for parameters: themselves, or their float32 copies.

    Raises:
        UnsupportedError: the optimiser does not step them as they are, as the flag needs it, but
            flattened with others or in parts.
    """
    copies = float32_copies(optimizer)
    stepped = [copies.get(id(parameter), (parameter, 0))[0] for parameter in parameters]
    groups = optimizer.optimizer.param_groups
    known = {id(parameter) for group in groups for parameter in group["params"]}
    if not all(id(s) in known and s.shape == p.shape for s, p in zip(stepped, parameters)):
        raise refusals.WHOLE_PARAMETERS.error(
            "flattened or sharded parameters, which have no rows", flag
        )
    return stepped


def couple_tables(
    optimizer: FairseqOptimizer, model: nn.Module, flag: str = "--optimizer coupled_adam"
) -> None:
    """Name the tables of ``model`` to a ``coupled_adam``, which may step copies of them.

    Raises:
        ConfigurationError: none of the tables is trained.
        UnsupportedError: the optimiser does not step the tables as they are, but flattened with
            other parameters or in parts.
    """
    tables = table_parameters(model)
    if not tables:
        wanted, found = f"a table that is trained, for {flag}", f"none in {type(model).__name__}"
        raise ConfigurationError(wanted, found, "Train it, or use --optimizer adam.")
    optimizer.optimizer.couple(stepped_for(optimizer, tables, flag))


class CoupledTables(Listener):
    """Names the tables to a ``coupled_adam``; fairseq builds an optimiser without names."""

    kind: Type[CoupledAdam] = CoupledAdam
    flag = "--optimizer coupled_adam"

    def name_parameters(self) -> None:
        """Name what the optimiser treats in another way than Adam does."""
        couple_tables(self.trainer.optimizer, self.trainer.get_model(), self.flag)

    def begin_epoch(self, epoch: int) -> None:  # noqa: ARG002
        """Name the parameters; fairseq's quantisation may have built the optimiser anew."""
        inner = self.trainer.optimizer.optimizer
        if type(inner) is self.kind:
            self.name_parameters()
        if type(getattr(inner, "optim", None)) is self.kind:
            raise refusals.WHOLE_PARAMETERS.error(
                "--zero-sharding os, which splits its state", self.flag
            )
        parts = getattr(inner, "optimizers", {})
        if any(type(part.optimizer) is self.kind for part in parts.values()):
            raise refusals.ONE_OPTIMIZER.error(
                "--optimizer composite with one among its groups", self.flag
            )


TABLES = ("adam", "coupled_adam")
_Adjustments: Any = ChoiceEnum(ADJUSTMENTS)
_Tables: Any = ChoiceEnum(TABLES)


@dataclass
class MuonConfig(CoupledAdamConfig):
    """Flags of the optimiser: its own, and those of fairseq's ``adam`` that apply."""

    muon_momentum: float = option(0.95, "momentum of the matrices that Muon steps")
    muon_adjust_lr: _Adjustments = option(
        ADJUSTMENTS[0],
        "factor on the learning rate of these matrices: match_rms_adamw makes their steps as large "
        "as those of Adam, so that its rate can be kept",
    )
    muon_tables: _Tables = option(TABLES[0], "how the tables are trained")


@register_optimizer("muon", dataclass=MuonConfig)
class FairseqMuon(_WithAdam):
    """:class:`Muon`; before the first step :class:`MuonMatrices` names the matrices."""

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
        matrices = hidden_matrices_by_name(model, table_parameters(model))
        optimizer.optimizer.take(stepped_for(optimizer, list(matrices.values()), self.flag))
        coupled = _text(self.trainer.cfg.optimizer.muon_tables) == "coupled_adam"
        if coupled:
            super().name_parameters()
        if self._told:
            return
        self._told = True
        kinds = Counter(re.sub(r"\d+", "*", name) for name in matrices)
        weights = sum(matrix.numel() for matrix in matrices.values())
        logger.info(
            "Muon steps %d matrices of %d weights: %s; Adam steps all other parameters, and %s",
            len(matrices),
            weights,
            ", ".join(f"{name} ({count})" for name, count in kinds.items()) or "none",
            "couples the second moments of tables" if coupled else "treats tables like them",
        )
