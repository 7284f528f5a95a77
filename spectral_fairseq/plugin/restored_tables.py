"""What is checked of a checkpoint before its tables are restored into a model.

fairseq reports every error of restoring a model as "please ensure that the architectures match",
and it cannot know that averaged factors make no table.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, Dict, List, Mapping, Tuple

import torch
from torch import Tensor, nn

from spectral_fairseq.checkpoints.tensors import refuse_unequal
from spectral_fairseq.compat.patching import Patch, replaces, wrapping
from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.embeddings.entries import entries_by_module, factored_kind
from spectral_fairseq.embeddings.svd import V_SCALE
from spectral_fairseq.errors import OTHER_FOLDER, CheckpointError

logger = logging.getLogger(__name__)

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
            f"checkpoint. {OTHER_FOLDER}",
        )


def check_output_layers(stored: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse an output layer of this package over a plain table where the model has fairseq's own.

    A soft cap is one: its table lies in the layer, and no plain layer computes it.

    Raises:
        CheckpointError: the checkpoint has one.
    """
    built = entries_by_module(model.state_dict())
    for module in entries_by_module(stored):
        layer, _, last = module.rpartition(".")
        if last == "table" and "weight" in built.get(layer, ()):
            raise CheckpointError(
                f"a checkpoint with an output layer of fairseq in {layer}",
                "one of this package, such as that of --logit-softcap",
                "Use an arch of this package with the --output-head and --logit-softcap of that "
                f"checkpoint. {OTHER_FOLDER}",
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
            "of that checkpoint; or, if it is of a Transformer with one softmax, make it plain "
            f"with spectral-fairseq export and start from that. {OTHER_FOLDER}",
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
    # In the order of the model and of the file, so that the same entry is named each time.
    for names in dict.fromkeys(tuple(name for name, _ in sharing) for sharing in shared):
        # A plain table may be loaded into a factored one, whose parameters have other names.
        for entry in dict.fromkeys(key for name in names for key in entries_of.get(name, ())):
            keys = [f"{name}.{entry}" for name in names]
            given_keys = [key for key in keys if key not in alone and _has_numbers(stored.get(key))]
            refuse_unequal(
                stored,
                given_keys,
                "in the checkpoint, which are one in this model",
                "Share the tables that the training of the checkpoint shared: "
                "--share-all-embeddings, --share-decoder-input-output-embed. If these were shared, "
                "the file is damaged, or another program has changed one of them. "
                f"{OTHER_FOLDER}",
            )


def _has_numbers(value: Any) -> bool:
    """Whether a stored value is a tensor whose numbers are here, one after the other."""
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta


def _column_length(v: Any) -> float:
    """The mean square of the lengths of V's columns, without their scale; 1 for what is no V."""
    if not _has_numbers(v) or v.dim() != 2 or not v.is_floating_point():
        return 1.0
    return float(v.float().square().sum(0).mean()) / V_SCALE**2


@wrapping
def _checking_kinds(self: Any, state_dict: Any, *, original: Callable[..., None]) -> None:
    original(self, state_dict)
    check_tables(state_dict, self)
    check_shared(state_dict, self)
    check_experts(state_dict, self)
    check_output_layers(state_dict, self)


TABLE_KINDS = Patch(
    name="kinds of tables",
    reason="A checkpoint whose tables are stored in another way than the model's, or that is of "
    "another mixture, is refused with the remedy, where fairseq only says that the architectures "
    "differ; so are two tables for one of the model, of which fairseq takes the last; averages of "
    "factors get a warning.",
    install=replaces({"fairseq.models:BaseFairseqModel.upgrade_state_dict": _checking_kinds}),
)
