"""The optimiser ``muon``, which steps the hidden matrices by Muon and everything else by Adam."""

# No "from __future__ import annotations" here: fairseq and omegaconf read the field types.
import ast
import logging
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Tuple

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.modules import AdaptiveSoftmax, LearnedPositionalEmbedding
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II
from torch import Tensor, nn

from spectral_fairseq import refusals
from spectral_fairseq.compat.float32_weights import float32_copies
from spectral_fairseq.embeddings import Table
from spectral_fairseq.errors import arguments_as_flags, misspelt
from spectral_fairseq.heads.head import Head
from spectral_fairseq.lm.muon import ADJUSTMENTS, Muon, hidden_matrices_by_name
from spectral_fairseq.options import option
from spectral_fairseq.plugin.listener import Listener

logger = logging.getLogger(__name__)

_Adjustments: Any = ChoiceEnum(ADJUSTMENTS)


@dataclass
class MuonConfig(FairseqDataclass):
    """Flags of the optimiser: its own, and those of fairseq's ``adam`` that apply."""

    muon_momentum: float = option(0.95, "momentum of the matrices that Muon steps")
    muon_adjust_lr: _Adjustments = option(
        ADJUSTMENTS[0],
        "factor on the learning rate of these matrices: match_rms_adamw makes their steps as large "
        "as those of Adam, so that its rate can be kept",
    )
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


@register_optimizer("muon", dataclass=MuonConfig)
class FairseqMuon(FairseqOptimizer):
    """:class:`Muon`; before the first step :class:`MuonMatrices` names the matrices."""

    def __init__(self, cfg: MuonConfig, params: Any) -> None:
        super().__init__(cfg)
        flags = {"momentum": "--muon-momentum", "adjust_lr_fn": "--muon-adjust-lr"}
        with arguments_as_flags(**flags):
            self._optimizer = Muon(
                params,
                momentum=cfg.muon_momentum,
                adjust_lr_fn=str(getattr(cfg.muon_adjust_lr, "value", cfg.muon_adjust_lr)),
                **self.optimizer_config,
            )

    @property
    def optimizer_config(self) -> Dict[str, Any]:
        """Keyword arguments of the torch optimiser, which its groups of parameters have too."""
        return {
            "lr": self.cfg.lr[0],
            "betas": two_numbers(self.cfg.adam_betas),
            "eps": self.cfg.adam_eps,
            "weight_decay": self.cfg.weight_decay,
        }


def table_parameters(model: nn.Module, dictionaries: Iterable[Any] = ()) -> List[nn.Parameter]:
    """The parameters of a model that have a row for each word, or that write words, each once.

    These are the matrices of embeddings (of a factored table U or v, whose rows are words), but not
    those of positions; what an output head holds itself, such as the vectors of clusters; the
    clusters of fairseq's adaptive softmax; and every matrix with a row for each word of a
    dictionary outside of the numbered layers, where hidden ones may be as wide. This finds the
    output layers of decoders and encoders under any name, those for CTC too, and the parameters
    from which a weight norm computes them.

    Args:
        model: any model of fairseq.
        dictionaries: those of the task, beside those that parts of the model know.
    """
    tables: List[Any] = []
    sizes = {len(one) for one in dictionaries}
    for module in model.modules():
        sizes.update(len(one) for one in [getattr(module, "dictionary", None)] if one is not None)
        if isinstance(module, LearnedPositionalEmbedding):
            continue
        if isinstance(module, (Table, nn.Embedding)):
            parameters = module.parameters(recurse=False)
            tables.extend(
                p for p in parameters if p.dim() == 2 and p.size(0) == module.num_embeddings
            )
        if isinstance(module, Head):
            tables.extend(p for p in module.parameters(recurse=False) if p.dim() == 2)
        if isinstance(module, AdaptiveSoftmax):
            head = getattr(module.head, "class_proj", module.head)  # beside a tied table
            clusters = [head, *(tail[-1] for tail in module.tail)]
            tables.extend(table.weight for table in clusters if isinstance(table, nn.Linear))
    for name, parameter in model.named_parameters():
        numbered = any(part.isdigit() for part in name.split("."))
        if parameter.dim() == 2 and len(parameter) in sizes and not numbered:
            tables.append(parameter)
    return list({id(table): table for table in tables if table.requires_grad}.values())


def dictionaries_of(task: Any) -> List[Any]:
    """The dictionaries of a task, one for each side; those that it has."""
    found = []
    for side in ("source_dictionary", "target_dictionary"):
        try:
            found.append(getattr(task, side, None))
        except NotImplementedError:  # fairseq's base class, of a task that has none
            continue
    return [dictionary for dictionary in found if dictionary is not None]


def stepped_for(optimizer: Any, parameters: List[nn.Parameter]) -> List[Tensor]:
    """What a fairseq optimiser steps for parameters: themselves, or their float32 copies.

    Raises:
        UnsupportedError: the optimiser does not step them as they are, but flattened with others or
            in parts.
    """
    copies = float32_copies(optimizer)
    stepped = [copies.get(id(parameter), (parameter, 0))[0] for parameter in parameters]
    groups = optimizer.optimizer.param_groups
    known = {id(parameter) for group in groups for parameter in group["params"]}
    if not all(id(s) in known and s.shape == p.shape for s, p in zip(stepped, parameters)):
        raise refusals.WHOLE_PARAMETERS.error("flattened or sharded parameters, which have no rows")
    return stepped


class MuonMatrices(Listener):
    """Names the hidden matrices to a ``muon``; fairseq builds an optimiser without names."""

    _told = False

    def begin_epoch(self, epoch: int) -> None:  # noqa: ARG002
        """Name them; where an optimiser that fairseq wraps is a ``muon``, refuse it."""
        inner = self.trainer.optimizer.optimizer
        if type(inner) is Muon:
            self._name_matrices(inner)
        if type(getattr(inner, "optim", None)) is Muon:
            raise refusals.WHOLE_PARAMETERS.error("--zero-sharding os, which splits its state")
        parts = getattr(inner, "optimizers", {})
        if any(type(part.optimizer) is Muon for part in parts.values()):
            raise refusals.ONE_OPTIMIZER.error("--optimizer composite with one among its groups")

    def _name_matrices(self, muon: Muon) -> None:
        model = self.trainer.get_model()
        tables = table_parameters(model, dictionaries_of(self.trainer.task))
        matrices = hidden_matrices_by_name(model, tables)
        muon.take(stepped_for(self.trainer.optimizer, list(matrices.values())))
        if self._told:
            return
        self._told = True
        kinds = Counter(re.sub(r"\d+", "*", name) for name in matrices)
        logger.info(
            "Muon steps %d matrices of %d weights: %s; Adam steps all other parameters",
            len(matrices),
            sum(matrix.numel() for matrix in matrices.values()),
            ", ".join(f"{name} ({count})" for name, count in kinds.items()) or "none",
        )
