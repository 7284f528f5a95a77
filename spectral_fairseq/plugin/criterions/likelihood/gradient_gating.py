"""The likelihood with gated gradients of rare words' output vectors: Yu et al., ACL 2022.

"Rare Tokens Degenerate All Tokens", https://arxiv.org/abs/2109.03127. The loss is that of
``label_smoothed_cross_entropy``; only the gradient of the output table W changes, and with it those
of the factors of which W is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.gradients import Gates, gated_scores, gates_of_counts
from spectral_fairseq.plugin.criterions.likelihood.base import Likelihood
from spectral_fairseq.plugin.criterions.likelihood.full_scores import FullScores
from spectral_fairseq.plugin.criterions.likelihood.output_layer import (
    OutputLayer,
    check_output_layer,
    output_layer_replaced,
)
from spectral_fairseq.plugin.criterions.likelihood.word_memory import WordMemory
from spectral_fairseq.plugin.criterions.updates import updates_of
from spectral_fairseq.plugin.flags import Flag, checked, finite_nonnegative
from spectral_fairseq.plugin.models.output_table import (
    check_trained,
    head_of,
    softmax_operands,
)

GRADIENT_GATING = Flag(
    "gradient_gating",
    0.0,
    "alpha of adaptive gradient gating: words with fewer targets than this in an update are rare, "
    "and the gradients that push their output vectors away are scaled down; the paper has 0.02 "
    "and 0.03",
    finite_nonnegative,
)
GRADIENT_GATING_MEMORY = Flag(
    "gradient_gating_memory",
    1000,
    "K of adaptive gradient gating: number of updates over which words are counted; the paper "
    "counts over the updates of an epoch",
    checked("of at least 1", lambda value: value >= 1),
)


class GradientGating(FullScores):
    """The plain likelihood, computed from scores whose table receives gated gradients.

    Args:
        criterion: the criterion that takes it; its ``word_memory`` lives as long as it does.
        alpha: words that occur less often than this in an update are rare.
    """

    def __init__(self, criterion: Any, alpha: float) -> None:
        super().__init__(criterion)
        self.alpha = alpha

    def check(self, model: nn.Module) -> None:
        """See the base class.

        Raises:
            ConfigurationError: an output layer that is not a single softmax, that cannot be
                replaced, or whose table is not trained.
        """
        head = head_of(model)
        if getattr(head, "own_loss", False):
            raise ConfigurationError(
                "a single softmax for --gradient-gating",
                f"{type(head).__name__}, in which a word has no single score",
                "Use --output-head softmax, or drop --gradient-gating.",
            )
        check_output_layer(model)
        num_words = self.criterion.penalties.view(model).words.rows
        check_trained(model, num_words, GRADIENT_GATING.option)

    def __call__(self, model: nn.Module, sample: Any, reduce: bool) -> Likelihood:
        """See the base class."""
        self.check(model)
        target = sample["target"]
        memory: WordMemory = self.criterion.word_memory
        counted = target[target.ne(self.criterion.padding_idx)]
        memory.add(counted, updates_of(model))
        gates = self._gates(model, memory, target.device)
        num_words = self.criterion.penalties.view(model).words.rows

        def gate(_: OutputLayer) -> OutputLayer:
            def gated(features: Tensor) -> Tensor:
                identity = torch.eye(
                    features.size(-1), dtype=features.dtype, device=features.device
                )
                # W = M B' of a factored table; others return the features that they were given.
                basis, matrix, bias = softmax_operands(model, identity, num_words)
                scores = gated_scores(
                    features.flatten(0, -2),
                    matrix,
                    target.flatten(),
                    gates,
                    None if basis is identity else basis,
                )
                scores = scores if bias is None else scores + bias
                return scores.view(*features.shape[:-1], -1)

            return gated

        with output_layer_replaced(model, gate):
            return super().__call__(model, sample, reduce)

    def _gates(self, model: nn.Module, memory: WordMemory, device: torch.device) -> Gates:
        words = self.criterion.penalties.view(model).words
        # Special symbols and padding rows are no words, so nothing about them is rare.
        special = torch.arange(words.dictionary.nspecial)
        never_rare = torch.cat([special, words.excluded]).unique()
        gates = gates_of_counts(memory.total, len(memory), self.alpha, never_rare)
        return Gates(*(each.to(device) for each in gates))
