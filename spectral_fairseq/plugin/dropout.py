"""``--fast-dropout``: fairseq's dropout on a CPU, with masks from a quarter of the random numbers.

The same seed gives other masks than without the flag, so it is off by default. The dropout of
attention probabilities is a part of torch's attention, and keeps torch's masks.
"""

from __future__ import annotations

from fairseq.modules import FairseqDropout
from torch import Tensor, nn

from spectral_fairseq.functional.fast_dropout import fast_dropout
from spectral_fairseq.options import Option

FAIRSEQ_DROPOUT = "dropout by fairseq's modules on a CPU"
FAST_DROPOUT = Option(
    "fast_dropout",
    False,
    "draw the masks of dropout on a CPU from a quarter of the random numbers; the masks differ "
    "from those that fairseq draws with the same seed",
    needs=(FAIRSEQ_DROPOUT,),
)


class FastDropout(FairseqDropout):
    """fairseq's module, which calls :func:`fast_dropout` on a CPU. It has no state either."""

    def forward(self, x: Tensor, inplace: bool = False) -> Tensor:
        """See the base class; ``inplace`` has no effect on a CPU."""
        drops = self.p > 0 and (self.training or self.apply_during_inference)
        if not drops or x.device.type != "cpu":
            return super().forward(x, inplace)
        return fast_dropout(x, self.p)


def draw_masks_fast(model: nn.Module) -> None:
    """Make every dropout module of fairseq in a model a :class:`FastDropout`."""
    for module in model.modules():
        if isinstance(module, FairseqDropout):
            # Its settings, hooks and place in the model stay as they are.
            module.__class__ = FastDropout


def draws_masks_fast(model: nn.Module) -> bool:
    """Whether the flag has an effect on a model where it is now."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    return on_cpu and any(
        isinstance(module, FastDropout) and module.p > 0 for module in model.modules()
    )
