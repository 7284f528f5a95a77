"""Refuse ways of training that would run, and would train something else or nothing.

- FSDP keeps a share of every parameter on each worker, so that a penalty, or a loss that multiplies
  by the table itself, would find a flat piece in place of the table. Models of this package refuse
  it when they are built; those of fairseq do not know what they will be trained with.
- Memory-efficient half precision has no float32 copies of the parameters. An SVD table's sigma
  starts near 1 and the diagonal of its stored V at 16, whose neighbours in bfloat16 are 0.008 and
  0.125 away, in float16 0.001 and 0.016. A step of Adam is as large as the learning rate: added to
  such a number it rounds to nothing, and the spectrum never moves. Neither do the lengths of a
  weight-norm table, which lie between 1 and 6.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.embeddings import SVDEmbedding, WeightNormEmbedding
from spectral_fairseq.errors import UnsupportedError
from spectral_fairseq.plugin.criterions.penalised import PenalisedCrossEntropy


def check_ways(trainer: Any) -> None:
    """Refuse them before the first update.

    Args:
        trainer: fairseq's.

    Raises:
        UnsupportedError: see the module.
    """
    if isinstance(trainer.get_criterion(), PenalisedCrossEntropy):
        if trainer.cfg.distributed_training.ddp_backend == "fully_sharded":
            raise UnsupportedError(
                "every worker to hold the whole table, for a criterion of this package",
                "--ddp-backend fully_sharded",
                "Use --ddp-backend pytorch_ddp or legacy_ddp.",
            )
    rounded = (SVDEmbedding, WeightNormEmbedding)
    if not any(isinstance(module, rounded) for module in trainer.get_model().modules()):
        return
    for precision in ("fp16", "bf16"):
        if getattr(trainer.cfg.common, f"memory_efficient_{precision}", False):
            raise UnsupportedError(
                "float32 copies of an SVD or weight-norm table's parameters, whose steps half "
                "precision rounds to nothing",
                f"--memory-efficient-{precision}",
                f"Use --{precision} or --amp, or a table of another --embedding-type.",
            )


def _checking(begin_epoch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin_epoch)
    def check_and_begin_epoch(self: Any, epoch: int) -> Any:
        check_ways(self)
        return begin_epoch(self, epoch)

    return check_and_begin_epoch


PATCH = Patch(
    name="ways of training",
    reason="Sharded or rounded tables, which would train silently wrong, are refused.",
    install=replaces({"fairseq.trainer:Trainer.begin_epoch": _checking}),
)
