"""The base class of output layers: a table, scores, and a loss that never holds all scores."""

from typing import Any, ClassVar, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from spectral_fairseq.embeddings.table import Table
from spectral_fairseq.functional.products import row_norms
from spectral_fairseq.functional.softmax_loss import (
    AdversarialLoss,
    adversarial_blockwise_cross_entropy,
    adversarial_margin,
    blockwise_cross_entropy,
    sigsoftmax_cross_entropy,
    sigsoftmax_scores,
)
from spectral_fairseq.options import Option

# No "from __future__ import annotations" here: TorchScript reads the annotations.


class HeadSpec(NamedTuple):
    """What an output layer is built for, whatever its kind.

    Attributes:
        input_dim: d_h, width of the features.
        bias: give the scores a bias.
        locked_dim: dimension of the features along which one dropout mask holds; ``None`` draws a
            mask for every position.
        init_std: standard deviation of the architecture's initial weights.
    """

    input_dim: int
    bias: bool = False
    locked_dim: Optional[int] = None
    init_std: float = 0.02


class Head(nn.Module):
    """Base class of output layers, which map features to scores of all words.

    Args:
        table: W, which look-ups may share.

    Class attributes:
        kind: name of the kind of head, one of the choices of ``output_head``.
        summary: the kind in a few words.
        options: arguments that users choose.
        any_width: whether the features may be wider or narrower than the table.
        own_loss: whether criterions take :meth:`loss` unless they are told to use the scores.
        adversarial: whether it has :meth:`adversarial_loss`.
    """

    kind: ClassVar[str]
    summary: ClassVar[str]
    options: ClassVar[Tuple[Option, ...]] = ()
    any_width: ClassVar[bool] = False
    own_loss: ClassVar[bool] = False
    adversarial: ClassVar[bool] = False

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table

    @classmethod
    def build(cls, table: Table, spec: HeadSpec, **options: Any) -> "Head":
        """A new head.

        Args:
            table: W.
            spec: what the head is for.
            **options: the arguments that :attr:`options` declares.
        """
        raise NotImplementedError

    def loss(
        self,
        features: Tensor,
        targets: Tensor,
        label_smoothing: float = 0.0,
        ignore_index: Optional[int] = None,
    ) -> Tuple[Tensor, Tensor]:
        """Label-smoothed cross entropy, computed from blocks of scores.

        Args:
            features: shape (*, d_h).
            targets: shape (*).
            label_smoothing: eps, as fairseq's ``label_smoothed_cross_entropy`` spreads it.
            ignore_index: targets with this value contribute zero.

        Returns:
            loss_sum and nll_sum, in nats, float32; only loss_sum has a gradient.
        """
        raise NotImplementedError

    def adversarial_loss(
        self,
        features: Tensor,
        targets: Tensor,
        epsilon: float,
        label_smoothing: float = 0.0,
        ignore_index: Optional[int] = None,
    ) -> AdversarialLoss:
        """:meth:`loss` with the target's logits lowered: ``functional/softmax_loss.py``.

        Args:
            features: shape (*, d_h).
            targets: shape (*).
            epsilon: radius of the perturbation as a share of ||w_y||, at least 0.
            label_smoothing: as of :meth:`loss`.
            ignore_index: targets with this value contribute zero.
        """
        raise NotImplementedError

    def check_label_smoothing(self, label_smoothing: float) -> None:
        """Raise an error, before training starts, if :meth:`loss` cannot smooth labels."""

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """Rename the output table of a plain checkpoint; fairseq calls this.

        A plain checkpoint keeps the table as ``weight`` of a Linear. fairseq's decoder also adds
        that key to this package's checkpoints if their shared table is plain.
        """
        weight = state_dict.pop(f"{name}.weight", None)
        has_table = any(key.startswith(f"{name}.table.") for key in state_dict)
        if weight is not None and not has_table:
            state_dict[f"{name}.table.weight"] = weight


# The single softmax, p(y | h) = softmax(W h + b)_y, over a table of any kind.


class SoftmaxHead(Head):
    """Logits of hidden states.

    Args:
        table: W, which look-ups may share.
        bias: give the logits a bias b, shape (N,), zero at the start.
    """

    kind = "softmax"
    summary = "one softmax"
    adversarial = True

    cross_entropy = staticmethod(blockwise_cross_entropy)

    bias: Optional[Tensor]

    def __init__(self, table: Table, *, bias: bool = False) -> None:
        super().__init__(table)
        if bias:
            self.bias = nn.Parameter(torch.zeros(table.num_embeddings))
        else:
            self.register_parameter("bias", None)

    @classmethod
    def build(cls, table: Table, spec: HeadSpec, **options: Any) -> "SoftmaxHead":
        """A new head; the features must be as wide as the table."""
        return cls(table, bias=spec.bias, **options)

    def forward(self, features: Tensor) -> Tensor:
        """Logits, shape (*, N), of ``features``, shape (*, d)."""
        return self.table.project(features, self.bias)

    def loss(
        self,
        features: Tensor,
        targets: Tensor,
        label_smoothing: float = 0.0,
        ignore_index: Optional[int] = None,
    ) -> Tuple[Tensor, Tensor]:
        """Label-smoothed cross entropy; see :meth:`Head.loss`."""
        rows, matrix = self.table.operands(features.flatten(0, -2))
        return self.cross_entropy(
            rows,
            targets.flatten(),
            matrix,
            self.bias,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
        )

    def adversarial_loss(
        self,
        features: Tensor,
        targets: Tensor,
        epsilon: float,
        label_smoothing: float = 0.0,
        ignore_index: Optional[int] = None,
    ) -> AdversarialLoss:
        """The loss with the target's logit lowered; see :meth:`Head.adversarial_loss`."""
        features, targets = features.flatten(0, -2), targets.flatten()
        norms = row_norms(self.table.vectors(targets))
        rows, matrix = self.table.operands(features)
        return adversarial_blockwise_cross_entropy(
            rows,
            targets,
            matrix,
            adversarial_margin(features, norms, targets, epsilon),
            self.bias,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
        )


# The sigsoftmax over a table of any kind: a softmax whose log-probabilities have any rank.
#
# Kanai et al., NeurIPS 2018, https://arxiv.org/abs/1805.10829


class SigSoftmaxHead(SoftmaxHead):
    """Scores z + log sigmoid(z) of the logits z = W h + b; their softmax is the sigsoftmax.

    Args:
        table: W, which look-ups may share.
        bias: give the logits a bias b, shape (N,), zero at the start.
    """

    kind = "sigsoftmax"
    summary = "one sigsoftmax"
    adversarial = False
    cross_entropy = staticmethod(sigsoftmax_cross_entropy)  # type: ignore[assignment]
    own_loss = True  # so that no loss for linear scores is taken

    def forward(self, features: Tensor) -> Tensor:
        """Scores, shape (*, N), of ``features``, shape (*, d)."""
        return sigsoftmax_scores(self.table.project(features, self.bias))
