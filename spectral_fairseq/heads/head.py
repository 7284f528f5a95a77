"""The base class of output layers: a table, scores, and a loss that never holds all scores."""

from typing import Any, ClassVar, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from spectral_fairseq.embeddings.table import Table
from spectral_fairseq.errors import UnsupportedError
from spectral_fairseq.functional.products import row_norms
from spectral_fairseq.functional.softmax_loss import (
    AdversarialLoss,
    adversarial_blockwise_cross_entropy,
    adversarial_margin,
    z_cross_entropy,
)
from spectral_fairseq.functional.z_loss import ZLoss, check_softcap, softcapped
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
        normalised: whether its scores have one normaliser, so that it has :meth:`z_loss`.

    Attributes:
        own_loss: whether criterions take :meth:`loss` unless they are told to use the scores.
        adversarial: whether it has :meth:`adversarial_loss`.
        softcap: c of the scores' soft cap, ``None`` for none.
    """

    kind: ClassVar[str]
    summary: ClassVar[str]
    options: ClassVar[Tuple[Option, ...]] = ()
    any_width: ClassVar[bool] = False
    own_loss: bool = False
    adversarial: bool = False
    normalised: ClassVar[bool] = False

    softcap: Optional[float]

    def __init__(self, table: Table, softcap: Optional[float] = None) -> None:
        super().__init__()
        self.table = table
        check_softcap(softcap)
        self.softcap = None if softcap is None else float(softcap)
        if softcap is not None:
            if not self.normalised:
                raise UnsupportedError(
                    "an output layer with one softmax, for `softcap`",
                    f"{type(self).__name__}, whose scores have no single normaliser",
                    "Use SoftmaxHead or MixtureOfContexts, or leave `softcap` out.",
                )
            # The scores are no longer linear in the features.
            self.own_loss, self.adversarial = True, False

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

    def check_linear(self) -> None:
        """Refuse scores with a soft cap, whose targets have no single logit w'h + b.

        Raises:
            UnsupportedError: the scores have a cap.
        """
        if self.softcap is not None:
            raise UnsupportedError(
                "scores without a cap, for the adversarial loss",
                f"softcap={self.softcap:g}",
                "Leave one of them out.",
            )

    def z_loss(
        self,
        features: Tensor,
        targets: Tensor,
        z_loss: float,
        label_smoothing: float = 0.0,
        ignore_index: Optional[int] = None,
    ) -> ZLoss:
        """:meth:`loss` with the square of the normaliser: ``functional/z_loss.py``.

        Args:
            features: shape (*, d_h).
            targets: shape (*).
            z_loss: lambda, at least 0.
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


SOFTCAP = Option(
    "logit_softcap",
    None,
    "c of a soft cap on the scores of an output layer with one softmax, c tanh(score / c); 30 in "
    "Gemma 2. It is a part of the model",
    type=Optional[float],
    argument="softcap",
)


# The single softmax, p(y | h) = softmax(W h + b)_y, over a table of any kind.


class SoftmaxHead(Head):
    """Logits of hidden states.

    Args:
        table: W, which look-ups may share.
        bias: give the logits a bias b, shape (N,), zero at the start.
        softcap: c, with which the scores are c tanh((W h + b) / c); ``None`` for none.

    Raises:
        ConfigurationError: c is not above 0.
    """

    kind = "softmax"
    summary = "one softmax"
    options: ClassVar[Tuple[Option, ...]] = (SOFTCAP,)
    adversarial = True
    normalised = True

    bias: Optional[Tensor]

    def __init__(
        self, table: Table, *, bias: bool = False, softcap: Optional[float] = None
    ) -> None:
        super().__init__(table, softcap)
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
        scores = self.table.project(features, self.bias)
        softcap = self.softcap
        return scores if softcap is None else softcapped(scores, softcap)

    def loss(
        self,
        features: Tensor,
        targets: Tensor,
        label_smoothing: float = 0.0,
        ignore_index: Optional[int] = None,
    ) -> Tuple[Tensor, Tensor]:
        """Label-smoothed cross entropy; see :meth:`Head.loss`."""
        found = self.z_loss(features, targets, 0.0, label_smoothing, ignore_index)
        return found.loss, found.nll

    def z_loss(
        self,
        features: Tensor,
        targets: Tensor,
        z_loss: float,
        label_smoothing: float = 0.0,
        ignore_index: Optional[int] = None,
    ) -> ZLoss:
        """The loss with the square of the normaliser; see :meth:`Head.z_loss`."""
        rows, matrix = self.table.operands(features.flatten(0, -2))
        return z_cross_entropy(
            rows,
            targets.flatten(),
            matrix,
            self.bias,
            z_loss=z_loss,
            softcap=self.softcap,
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
        self.check_linear()
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
