"""Explain why a checkpoint's tables or output layer do not fit the model it is restored into.

fairseq reports every error of restoring a model as "please ensure that the architectures match",
and it cannot know that averaged factors make no table.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Callable, Mapping

import torch
from torch import Tensor, nn

from spectral_fairseq.checkpoints.rewriting import entries_by_module, factored_kind
from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.embeddings.svd import V_SCALE
from spectral_fairseq.errors import CheckpointError, SpectralFairseqError

logger = logging.getLogger(__name__)

# Of the squared lengths of V's columns, which are 1. A mean of two unrelated V has one half; the
# drift of a training whose factors are not renewed stays above.
SHORTEST = 0.7


def check_experts(stored: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse a mixture of another number of experts than the model's, which may have none.

    Args:
        stored: names -> tensors of a checkpoint, as they are about to be loaded.
        model: the model to load them into.

    Raises:
        CheckpointError: the numbers differ.
    """
    found, wanted = (_experts(entries) for entries in (stored, model.state_dict()))
    if stored and found != wanted:
        raise CheckpointError(
            f"a checkpoint of {wanted}",
            f"one of {found}",
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

    Args:
        stored: names -> tensors of a checkpoint, as they are about to be loaded.
        model: the model to load them into.

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
    found = (_column_length(entries_of[name]["V"]) for name in kinds if kinds[name] is SVDEmbedding)
    length = min(found, default=1.0)
    if length < SHORTEST:
        logger.warning(
            "expected an SVD table whose V has columns of length 1; found a mean square of %.2f. "
            "If fairseq's average_checkpoints.py made this checkpoint, it averaged factors of "
            "different decompositions, which make no table: use spectral-fairseq average.",
            length,
        )


def _column_length(v: Any) -> float:
    """The mean square of the lengths of V's columns, without their scale; 1 for what is no V."""
    if (
        not isinstance(v, Tensor)
        or v.dim() != 2
        or v.layout is not torch.strided
        or v.is_meta
        or not v.is_floating_point()
    ):
        return 1.0
    return float(v.float().square().sum(0).mean()) / V_SCALE**2


def _checking(upgrade_state_dict: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(upgrade_state_dict)
    def upgrade_and_check(self: Any, state_dict: Any) -> None:
        upgrade_state_dict(self, state_dict)
        check_tables(state_dict, self)
        check_experts(state_dict, self)

    return upgrade_and_check


def _explaining(load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_checkpoint)
    def load_or_explain(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return load_checkpoint(self, *args, **kwargs)
        except Exception as error:
            if isinstance(error.__context__, SpectralFairseqError):
                raise error.__context__ from None
            raise

    return load_or_explain


PATCH = Patch(
    name="kinds of tables",
    reason="A checkpoint whose tables are stored in another way than the model's, or that is of "
    "another mixture, is refused with the remedy, where fairseq only says that the architectures "
    "differ; averages of factors get a warning.",
    install=replaces(
        {
            "fairseq.models:BaseFairseqModel.upgrade_state_dict": _checking,
            "fairseq.trainer:Trainer.load_checkpoint": _explaining,
        }
    ),
)
