"""``--fast-dropout``: fairseq's dropout with masks that cost a CPU a quarter of the random numbers.

The masks are other ones than fairseq's from the same seed, so the flag is off by default. Dropout
of attention probabilities happens within torch's attention, and keeps torch's masks.
"""

from __future__ import annotations

from fairseq.modules import FairseqDropout
from torch import Tensor, nn

from spectral_fairseq.functional.dropout import fast_dropout
from spectral_fairseq.options import Option

FAST_DROPOUT = Option(
    "fast_dropout",
    False,
    "draw the masks of dropout on a CPU from a quarter of the random numbers; the masks differ "
    "from those that fairseq draws with the same seed",
)


class FastDropout(FairseqDropout):
    """fairseq's module with :func:`fast_dropout` in it; what it saves is the same: nothing."""

    def forward(self, x: Tensor, inplace: bool = False) -> Tensor:
        """See the base class; ``inplace`` has no effect on a CPU."""
        drops = self.p > 0 and (self.training or self.apply_during_inference)
        if not drops or x.device.type != "cpu":
            return super().forward(x, inplace)
        return fast_dropout(x, self.p)


def draw_masks_fast(model: nn.Module) -> bool:
    """Let fairseq's dropout modules in a model draw their masks so; whether there is one."""
    modules = [module for module in model.modules() if isinstance(module, FairseqDropout)]
    for module in modules:
        # Its state, hooks and place in the model stay as they are.
        module.__class__ = FastDropout
    return any(module.p > 0 for module in modules)
