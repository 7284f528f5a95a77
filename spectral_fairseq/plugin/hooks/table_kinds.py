"""Explain why a checkpoint cannot be restored if its tables are of another kind than the model's.

fairseq reports every error of restoring a model as "please ensure that the architectures match".
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Mapping

from torch import nn

from spectral_fairseq.checkpoints.collapse import entries_by_module, factored_kind
from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.errors import CheckpointError, SpectralFairseqError


def check_tables(stored: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse factored tables that a model does not have.

    Args:
        stored: names -> tensors of a checkpoint, as they are about to be loaded.
        model: the model to load them into.

    Raises:
        CheckpointError: a table of another kind than the model's.
    """
    kinds = {
        module: factored_kind(entries) for module, entries in entries_by_module(stored).items()
    }
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


def _checking(upgrade_state_dict: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(upgrade_state_dict)
    def upgrade_and_check(self: Any, state_dict: Any) -> None:
        upgrade_state_dict(self, state_dict)
        check_tables(state_dict, self)

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
    reason="A checkpoint whose tables are stored in another way than the model's is refused with "
    "the remedy, where fairseq only says that the architectures differ.",
    install=replaces(
        {
            "fairseq.models:BaseFairseqModel.upgrade_state_dict": _checking,
            "fairseq.trainer:Trainer.load_checkpoint": _explaining,
        }
    ),
)
