"""Two passes over each batch that are to agree: R-Drop and SimCut.

The formulas are in ``functional/consistency_loss.py``. The two passes of R-Drop have different
dropout; its objective is half of the paper's, so that the likelihood keeps the scale that it has
without R-Drop. The second pass of SimCut has positions of the embedded input set to zero, and both
sides have gradients, as in the authors' code.

Both passes are one forward pass over a batch in which each sentence stands twice, one after the
other. Data-parallel wrappers then see one pass, and batches that are sorted by length stay so.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any, Dict, Iterator, List, Tuple

import torch
from torch import Tensor, nn

from spectral_fairseq import refusals
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.consistency_loss import (
    ConsistencyLoss,
    consistency_cross_entropy,
    dense_consistency,
)
from spectral_fairseq.plugin.find import calls_output_layer, decoder_of, look_ups, softmax_operands
from spectral_fairseq.plugin.likelihood import (
    RDROP_WEIGHT,
    SIMCUT_WEIGHT,
    Likelihood,
    LikelihoodTerm,
    measure,
)
from spectral_fairseq.plugin.objective import MEASURE_NAMES, Parts


@contextmanager
def every_second_row_cut(model: nn.Module, probability: float, padding_idx: int) -> Iterator[None]:
    """Set embeddings of the rows 1, 3, 5, .. of a batch to zero inside the block.

    Each position is cut with the given probability, whatever the kind of the table, before the
    scale and the positions are applied; the others keep their values. The last token of a source,
    which ends the sentence, and the first of a decoder's input, which starts it, are never cut.

    Args:
        model: runs within the block, on token rows that come in pairs.
        probability: of each position.
        padding_idx: token of positions without a word.
    """
    decoding: List[bool] = []  # whether the decoder has started

    def cut(_: nn.Module, inputs: Any, vectors: Tensor) -> Tensor:
        words = inputs[0].ne(padding_idx)  # [2b, t]
        order = words if decoding else words.flip(1)
        protected = order.cumsum(1).eq(1)  # the first or the last word, and padding next to it
        if not decoding:
            protected = protected.flip(1)
        drawn = torch.rand(words.shape, device=words.device) < probability
        drawn &= words & ~protected
        drawn[::2] = False
        return vectors.masked_fill(drawn.unsqueeze(-1), 0.0)

    hooks = [
        decoder_of(model).register_forward_pre_hook(lambda *_: decoding.append(True)),
        *(look_up.register_forward_hook(cut) for look_up in look_ups(model)),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Consistency(LikelihoodTerm):
    """The likelihood and the weighted divergence of two passes.

    The logs keep the likelihood, of both passes or of the one that is not cut, and have the
    divergence for each token under a key of its own.

    Args:
        options: the parsed values of the flags; the weight of one method is above 0.

    Raises:
        ConfigurationError: a model without token embeddings, for SimCut.
        UnsupportedError: a model that carries a state from batch to batch.
    """

    def __init__(self, criterion: Any, parts: Parts, options: Any) -> None:
        super().__init__(criterion, parts)
        self.model_name = parts.model_name
        self.blockwise = (
            options.loss_form != "dense"
            and not criterion.report_accuracy
            and calls_output_layer(self.decoder)
            and not self.own_loss
        )
        self.makes_scores = self.blockwise
        self.symmetric = options.rdrop_weight > 0
        self.held = () if self.symmetric else parts.look_ups
        self.weight = options.rdrop_weight / 2 if self.symmetric else options.simcut_weight
        self.cutoff = options.simcut_cutoff
        self.flag = (RDROP_WEIGHT if self.symmetric else SIMCUT_WEIGHT).flag
        if getattr(self.decoder, "stateful", False):
            found = f"{type(self.decoder).__name__}, whose streams would be read twice"
            raise refusals.CONSISTENCY.error(found, self.flag)
        if not self.symmetric and not self.held:
            raise ConfigurationError(
                f"an encoder or a decoder with embed_tokens for {self.flag}",
                f"none in {self.model_name}",
                f"Use a transformer, transformer_lm or lstm arch, or drop {self.flag}.",
            )

    def __call__(self, model: nn.Module, sample: Any, reduce: bool) -> Likelihood:
        """See the base class."""
        cut = every_second_row_cut(model, self.cutoff, self.criterion.padding_idx)
        with nullcontext() if self.symmetric else cut:
            if self.blockwise and reduce:
                parts, net_output = self._from_blocks(model, sample)
            else:
                parts, net_output = self._from_log_probabilities(model, sample, reduce)
        logged, nll = parts.likelihood.detach(), parts.nll.detach()
        name = MEASURE_NAMES[0 if self.symmetric else 1]
        measures = (measure(name, parts.divergence, sample),)
        return Likelihood(parts.loss, logged, nll, net_output, measures)

    @property
    def _options(self) -> Dict[str, Any]:
        return {
            "weight": self.weight,
            "symmetric": self.symmetric,
            "label_smoothing": self.criterion.eps,
            "ignore_index": self.criterion.padding_idx,
        }

    def _from_blocks(self, model: nn.Module, sample: Any) -> Tuple[ConsistencyLoss, Any]:
        skip = self.criterion.ignore_prefix_size
        targets = sample["target"][:, skip:].flatten()

        def loss_instead(features: Tensor) -> Tensor:
            rows, dim = sample["target"].size(0), features.size(-1)
            pairs = features[:, skip:].reshape(rows, 2, -1, dim).transpose(1, 2)  # [b, t, 2, d]
            contexts, matrix, bias = softmax_operands(
                self.decoder, pairs.flatten(0, 1), self.words.rows
            )
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
        parts = dense_consistency(log_p.flatten(0, 1), targets, **self._options)
        shown = ConsistencyLoss(*(each.sum() if reduce else each.unsqueeze(1) for each in parts))
        first = (net_output[0][::2], *net_output[1:])
        return shown._replace(divergence=parts.divergence.sum()), first


def twice(net_input: Dict[str, Any]) -> Dict[str, Any]:
    """The input of a model with each row of its tensors followed by the same row again."""
    return {
        name: value.repeat_interleave(2, 0) if isinstance(value, Tensor) else value
        for name, value in net_input.items()
    }
