"""R-Drop: two passes over each batch, with different dropout, that are to agree.

The formula is in ``functional/consistency_loss.py``. The objective is half of the paper's, so that
the likelihood keeps the scale that it has without R-Drop.

Both passes are one forward pass over a batch in which each sentence stands twice, one after the
other. Data-parallel wrappers then see one pass, and batches that are sorted by length stay so.
"""

from __future__ import annotations

from typing import Any, Dict, Tuple

import torch
from torch import Tensor, nn

from spectral_fairseq import refusals
from spectral_fairseq.functional.consistency_loss import (
    ConsistencyLoss,
    consistency_cross_entropy,
    dense_consistency,
)
from spectral_fairseq.plugin.likelihood import RDROP_WEIGHT, Likelihood, LikelihoodTerm, measure
from spectral_fairseq.plugin.objective import R_DROP, Parts


class Consistency(LikelihoodTerm):
    """The likelihood and the weighted divergence of two passes.

    The logs keep the likelihood of both passes, and have the divergence for each token under a key
    of its own.

    Args:
        weight: alpha.
        blockwise: take blocks of scores W h + b.

    Raises:
        UnsupportedError: a model that carries a state from batch to batch.
    """

    flag = RDROP_WEIGHT.flag

    def __init__(self, criterion: Any, parts: Parts, weight: float, blockwise: bool) -> None:
        super().__init__(criterion, parts)
        self.blockwise = self.makes_scores = blockwise
        self.weight = weight / 2
        if getattr(self.decoder, "stateful", False):
            found = f"{type(self.decoder).__name__}, whose streams would be read twice"
            raise refusals.CONSISTENCY.error(found)

    def __call__(self, model: nn.Module, sample: Any, reduce: bool) -> Likelihood:
        """See the base class."""
        if self.blockwise and reduce:
            losses, net_output = self._from_blocks(model, sample)
        else:
            losses, net_output = self._from_log_probabilities(model, sample, reduce)
        logged, nll = losses.likelihood.detach(), losses.nll.detach()
        measures = (measure(R_DROP, losses.divergence, sample),)
        return Likelihood(losses.loss, logged, nll, net_output, measures)

    @property
    def _options(self) -> Dict[str, Any]:
        return {
            "weight": self.weight,
            "label_smoothing": self.criterion.eps,
            "ignore_index": self.criterion.padding_idx,
        }

    def _from_blocks(self, model: nn.Module, sample: Any) -> Tuple[ConsistencyLoss, Any]:
        skip = self.criterion.ignore_prefix_size
        targets = sample["target"][:, skip:].flatten()

        def loss_instead(features: Tensor) -> Tensor:
            rows, dim = sample["target"].size(0), features.size(-1)
            pairs = features[:, skip:].reshape(rows, 2, -1, dim).transpose(1, 2)  # [b, t, 2, d]
            contexts, matrix, bias = self.softmax_operands(pairs.flatten(0, 1))
            return torch.stack(
                consistency_cross_entropy(contexts, targets, matrix, bias, **self._options)
            )

        with self.output_layer_replaced(loss_instead):
            net_output = model(**twice(sample["net_input"]))
        return ConsistencyLoss(*net_output[0]), net_output

    def _from_log_probabilities(
        self, model: nn.Module, sample: Any, reduce: bool
    ) -> Tuple[ConsistencyLoss, Any]:
        net_output = model(**twice(sample["net_input"]))
        log_p, targets = self.criterion.get_lprobs_and_target(
            model, net_output, {**sample, "target": sample["target"].repeat_interleave(2, 0)}
        )
        rows = 2 * sample["target"].size(0)
        log_p = log_p.view(rows // 2, 2, -1, log_p.size(-1)).transpose(1, 2)  # [b, t, 2, N]
        targets = targets.view(rows, -1)[::2].reshape(-1)
        losses = dense_consistency(log_p.flatten(0, 1), targets, **self._options)
        shown = ConsistencyLoss(*(each.sum() if reduce else each.unsqueeze(1) for each in losses))
        first = (net_output[0][::2], *net_output[1:])
        return shown._replace(divergence=losses.divergence.sum()), first


def twice(net_input: Dict[str, Any]) -> Dict[str, Any]:
    """The input of a model with each row of its tensors followed by the same row again."""
    return {
        name: value.repeat_interleave(2, 0) if isinstance(value, Tensor) else value
        for name, value in net_input.items()
    }
