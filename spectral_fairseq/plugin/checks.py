"""What is checked of a model before it is trained, and of a checkpoint before it is restored."""

from __future__ import annotations

import logging
from typing import Any, Callable, Dict, Iterator, List, Mapping, Set, Tuple

import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.modules.quantization.pq.utils import get_layers
from fairseq.modules.quantization.scalar.modules import IntLinear
from torch import Tensor, nn

from spectral_fairseq import refusals
from spectral_fairseq.checkpoints.tensors import refuse_unequal
from spectral_fairseq.compat.patching import Patch, replaces, wrapping
from spectral_fairseq.embeddings import PlainEmbedding, SVDEmbedding, Table, WeightNormEmbedding
from spectral_fairseq.embeddings.entries import entries_by_module, factored_kind
from spectral_fairseq.embeddings.svd import V_SCALE
from spectral_fairseq.embeddings.weight_norm import tell_epoch
from spectral_fairseq.errors import CheckpointError
from spectral_fairseq.heads import Head, SoftmaxHead
from spectral_fairseq.plugin.awd_lstm import AWDLSTMLanguageModel
from spectral_fairseq.plugin.criterion import Objective, PenalisedCrossEntropy, objectives_in
from spectral_fairseq.plugin.find import head_of
from spectral_fairseq.plugin.likelihood import LOSS_FORM
from spectral_fairseq.plugin.listener import Listener
from spectral_fairseq.plugin.objective import Inputs
from spectral_fairseq.plugin.registry import warn_of_idle_options
from spectral_fairseq.plugin.transformer_xl import TransformerXLLanguageModel

logger = logging.getLogger(__name__)


# What fairseq's quantisation takes from under a feature is refused before training.
#
# ``--quantization-config-path`` replaces layers when the first epoch begins and between its
# stages: what a feature holds of the layer before is then no part of the model, and its work has no
# effect. ``--quant-noise-scalar`` lets an output layer compute its scores from a quantised copy of
# its table.


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
    for flag, held in _held(trainer):
        for name, module in replaced.items():
            if held & {id(module), *map(id, module.parameters(recurse=False))}:
                _refuse(name, flag)


def _refuse(name: str, ours: str) -> None:
    raise refusals.REPLACED_LAYERS.error(f"{_FLAG} that replaces {name}", ours)


def _held(trainer: Any) -> Iterator[Tuple[str, Set[int]]]:
    """Flags, and the ids of the parameters or modules that they hold on to."""
    for objective in objectives_in(trainer):
        table = objective.control.controlled(Inputs(objective.parts))
        if table is not None:
            yield table.flag, _ids([table.parameter])


def _ids(held: Any) -> Set[int]:
    return {id(tensor) for tensor in held}


def _flag_of_own_scores(objective: Objective) -> str:
    """The flag for which scores are computed beside fairseq's output layer; empty without one."""
    term = objective.likelihood
    if not isinstance(term.head, IntLinear):  # of tied tables fairseq quantises the look-up alone
        return ""
    if term.makes_scores:
        return term.flag
    return f"{LOSS_FORM.flag} blockwise" if objective.form.blockwise else ""


class WaysOfTraining(Listener):
    """Refuses ways of training that would run, and would train something else or nothing."""

    def begin_training(self) -> None:
        """Refuse sharded tables, and tables that half precision or quantisation keeps still."""
        modules = list(self.trainer.get_model().modules())
        ours = isinstance(self.trainer.get_criterion(), PenalisedCrossEntropy)
        if ours or any(map(_is_own, modules)):
            refusals.SHARDED.check(self.trainer.cfg)
        if any(isinstance(module, (SVDEmbedding, WeightNormEmbedding)) for module in modules):
            refusals.ROUNDED.check(self.trainer.cfg)
        check_quantisation(self.trainer)


def _is_own(module: nn.Module) -> bool:
    plain = isinstance(module, (PlainEmbedding, SoftmaxHead))
    return isinstance(module, (Table, Head)) and not plain


class Checks(Listener):
    """Lets the criterion check the model, and tells tables the epoch.

    fairseq tells the epoch to tasks, datasets and schedulers but to no module.
    """

    def begin_training(self) -> None:
        """Refuse what cannot be trained, and warn of flags without effect."""
        trainer = self.trainer
        model, criterion = trainer.get_model(), trainer.get_criterion()
        if isinstance(criterion, AdaptiveLoss) and isinstance(head_of(model), Head):
            raise refusals.ADAPTIVE_LOSS.error("--criterion adaptive_loss")
        warn_of_idle_options(model, trainer.cfg.model)
        if isinstance(criterion, PenalisedCrossEntropy):
            criterion.check_model(model)
            criterion.log_spectrum.check_metric(trainer.cfg.checkpoint.best_checkpoint_metric)
            for form in {str(objective.form) for objective in criterion.objectives_of(model)}:
                logger.info("the form of the loss is %s", form)
        elif isinstance(model, (AWDLSTMLanguageModel, TransformerXLLanguageModel)):
            model.warn_of_other_criterion(type(criterion).__name__)

    def begin_epoch(self, epoch: int) -> None:
        """Tell weight-norm tables, whose lengths may be frozen for some epochs."""
        tell_epoch(self.trainer.get_model(), epoch)


@wrapping
def _checking_kinds(self: Any, state_dict: Any, *, original: Callable[..., None]) -> None:
    original(self, state_dict)
    check_tables(state_dict, self)
    check_shared(state_dict, self)
    check_experts(state_dict, self)


TABLE_KINDS = Patch(
    name="kinds of tables",
    reason="A checkpoint whose tables are stored in another way than the model's, or that is of "
    "another mixture, is refused with the remedy, where fairseq only says that the architectures "
    "differ; so are two tables for one of the model, of which fairseq takes the last; averages of "
    "factors get a warning.",
    install=replaces({"fairseq.models:BaseFairseqModel.upgrade_state_dict": _checking_kinds}),
)


# What is checked of a checkpoint before it is restored into a model.
#
# fairseq reports every error of restoring a model as "please ensure that the architectures match",
# and it cannot know that averaged factors make no table.

# Of the squared lengths of V's columns, which are 1. A mean of two unrelated V has one half; the
# drift of a training whose factors are not renewed stays above.
SHORTEST = 0.7


def check_experts(stored: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse a mixture of another number of experts than the model's, which may have none.

    Raises:
        CheckpointError: the numbers differ.
    """
    stored_experts, built_experts = (_experts(entries) for entries in (stored, model.state_dict()))
    if stored and stored_experts != built_experts:
        raise CheckpointError(
            f"a checkpoint of {built_experts}",
            f"one of {stored_experts}",
            "Use an arch of this package with the --output-head and --mixture-components of that "
            "checkpoint.",
        )


def _experts(entries: Mapping[str, Any]) -> str:
    for name, weight in entries.items():
        if name.endswith("output_projection.prior.weight") and getattr(weight, "ndim", 0) == 2:
            return f"a mixture of {len(weight)} experts"
    return "a single softmax"


def check_tables(stored: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse factored tables that a model does not have, and warn of averaged factors.

    Raises:
        CheckpointError: a table of another kind than the model's.
    """
    entries_of = entries_by_module(stored)
    kinds = {module: factored_kind(entries) for module, entries in entries_of.items()}
    if not any(kinds.values()):
        return
    modules = entries_by_module(model.state_dict())
    for module, kind in kinds.items():
        entries = modules.get(module, {})
        wanted = factored_kind(entries)
        if kind is None or kind is wanted:
            continue
        expected = "without a table"
        if entries:
            expected = f"with a {wanted.kind} or plain table" if wanted else "with a plain table"
        raise CheckpointError(
            f"a checkpoint {expected} in {module}",
            f"one of --embedding-type {kind.kind}",
            "Use an arch of this package with the --embedding-type, --embedding-tables and sharing "
            "of that checkpoint; or, if it is of a Transformer, make it plain with "
            "spectral-fairseq export and start from that.",
        )
    lengths = (
        _column_length(entries_of[name]["V"]) for name in kinds if kinds[name] is SVDEmbedding
    )
    length = min(lengths, default=1.0)
    if length < SHORTEST:
        logger.warning(
            "expected an SVD table whose V has columns of length 1; found a mean square of %.2f. "
            "If fairseq's average_checkpoints.py made this checkpoint, it averaged factors of "
            "different decompositions, which make no table: use spectral-fairseq average.",
            length,
        )


def check_shared(stored: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse different tables that would be loaded into one, of which the last would win.

    Raises:
        CheckpointError: modules of the model share a table, and the checkpoint has two for them.
    """
    holders: Dict[Any, List[Tuple[str, str]]] = {}  # of a parameter or buffer, and its names there
    for name, module in model.named_modules(remove_duplicate=False):
        for key, part in (*module._parameters.items(), *module._buffers.items()):
            if part is not None:
                holders.setdefault(part, []).append((name, key))
    alone = {".".join(sharing[0]) for sharing in holders.values() if len(sharing) == 1}
    entries_of = entries_by_module(stored)
    shared = (sharing for sharing in holders.values() if len(sharing) > 1)
    for names in {tuple(name for name, _ in sharing) for sharing in shared}:
        # A plain table may be loaded into a factored one, whose parameters have other names.
        for entry in {key for name in names for key in entries_of.get(name, ())}:
            keys = [f"{name}.{entry}" for name in names]
            given_keys = [key for key in keys if key not in alone and _has_numbers(stored.get(key))]
            refuse_unequal(
                stored,
                given_keys,
                "in the checkpoint, which are one in this model",
                "Share the tables that the training of the checkpoint shared: "
                "--share-all-embeddings, --share-decoder-input-output-embed. If these were shared, "
                "the file is damaged, or another program has changed one of them.",
            )


def _has_numbers(value: Any) -> bool:
    """Whether a stored value is a tensor whose numbers are here, one after the other."""
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta


def _column_length(v: Any) -> float:
    """The mean square of the lengths of V's columns, without their scale; 1 for what is no V."""
    if not _has_numbers(v) or v.dim() != 2 or not v.is_floating_point():
        return 1.0
    return float(v.float().square().sum(0).mean()) / V_SCALE**2
