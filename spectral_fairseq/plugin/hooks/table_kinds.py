"""A checkpoint whose tables are stored in another way than the model's is refused with the remedy.

The host ends whatever goes wrong while a model is restored in "please ensure that the
architectures match".
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Mapping

from torch import nn

from spectral_fairseq.checkpoints.collapse import (
    SVD_ENTRIES,
    WEIGHT_NORM_ENTRIES,
    entries_by_module,
)
from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.errors import CheckpointError, SpectralFairseqError

KINDS = {"svd": SVD_ENTRIES, "weight-norm": WEIGHT_NORM_ENTRIES}


def check_tables(stored: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse factored tables that a model does not take.

    Args:
        stored: names -> tensors of a checkpoint, as they are about to be loaded.
        model: into which.

    Raises:
        CheckpointError: a table of another kind than the model's.
    """
    factored = {
        module: kind
        for module, entries in entries_by_module(stored).items()
        for kind in KINDS
        if KINDS[kind] <= set(entries)
    }
    if not factored:
        return
    own = entries_by_module(model.state_dict())
    for module, kind in factored.items():
        entries = set(own.get(module, {}))
        if KINDS[kind] <= entries:
            continue
        other = "".join(f"{name} or " for name in KINDS if KINDS[name] <= entries)
        raise CheckpointError(
            f"a checkpoint with a {other}plain table in {module}" if entries
            else f"a checkpoint without a table in {module}",
            f"one of --embedding-type {kind}",
            "Use an arch of this package with the --embedding-type, --embedding-tables and sharing "
            "of that checkpoint; or, if it is of a Transformer, make it plain with "
            "spectral-fairseq export and start from that.",
        )  # fmt: skip


def _checking(upgrade_state_dict: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(upgrade_state_dict)
    def upgrade_and_check(self: Any, state_dict: Any) -> None:
        upgrade_state_dict(self, state_dict)
        check_tables(state_dict, self)

    return upgrade_and_check


def _saying_why(load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_checkpoint)
    def load_or_say_why(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return load_checkpoint(self, *args, **kwargs)
        except Exception as error:
            if isinstance(error.__context__, SpectralFairseqError):
                raise error.__context__ from None
            raise

    return load_or_say_why


PATCH = Patch(
    name="kinds of tables",
    reason="A checkpoint whose tables are stored in another way than the model's is refused with "
    "the remedy, where fairseq only says that the architectures differ.",
    install=replaces(
        {
            "fairseq.models:BaseFairseqModel.upgrade_state_dict": _checking,
            "fairseq.trainer:Trainer.load_checkpoint": _saying_why,
        }
    ),
)
