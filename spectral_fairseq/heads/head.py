"""The base class of output layers: a table, scores, and a loss that never holds all scores.

Flags: ``--output-head`` softmax.
In order: ``plugin/table_and_head.py: head_kind``, ``Head.build``, ``Head.loss``.
"""

# No "from __future__ import annotations" here: TorchScript reads the annotations.
from typing import Any, ClassVar, Dict, NamedTuple, Optional, Tuple, Type

from torch import Tensor, nn

from spectral_fairseq.embeddings.table import Table
from spectral_fairseq.errors import UnsupportedError, check_range
from spectral_fairseq.functional.softmax_loss import Losses
from spectral_fairseq.options import Option


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
        normalised: whether its scores have one normaliser, so that there is a z-loss.

    Attributes:
        own_loss: whether criterions take :meth:`loss` unless they are told to use the scores.
        adversarial: whether a target has logits w'h + b, which can be lowered.
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
    bias: Optional[Tensor]

    def __init__(self, table: Table, softcap: Optional[float] = None) -> None:
        super().__init__()
        self.table = table
        check_range("`softcap`", softcap, above=0, optional=True)
        self.softcap = None if softcap is None else float(softcap)
        if softcap is not None:
            check_normalised(type(self), "softcap")
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
        *,
        epsilon: float = 0.0,
        z_loss: float = 0.0,
    ) -> Losses:
        """Label-smoothed cross entropy summed over tokens, computed from blocks of scores.

        Args:
            features: shape (*, d_h).
            targets: shape (*).
            label_smoothing: eps, as fairseq's ``label_smoothed_cross_entropy`` spreads it.
            ignore_index: targets with this value contribute zero.
            epsilon: radius of the perturbation of the targets' vectors, as a share of ||w_y||:
                ``functional/adversarial_softmax.py``, of a head that is ``adversarial``.
            z_loss: lambda of ``functional/softmax_loss.py``, of a head that is ``normalised``.

        Raises:
            UnsupportedError: an epsilon that this head cannot have, as its scores have no single
                logit w'h + b; or a lambda, as they have several normalisers.
        """
        if epsilon and not self.adversarial:
            cap = "" if self.softcap is None else f" with softcap={self.softcap:g}"
            raise UnsupportedError(
                "an output layer in which a target's score is a logit w'h + b, for the adversarial "
                "loss",
                f"{type(self).__name__}{cap}",
                "Leave one of them out.",
            )
        if z_loss:
            check_normalised(type(self), "z_loss")
        options = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
        return self.checked_loss(features, targets, epsilon=epsilon, z_loss=z_loss, **options)

    def checked_loss(self, features: Tensor, targets: Tensor, **options: Any) -> Losses:
        """Return :meth:`loss` for options that this head allows, by their names.

        A criterion, which has refused others when training began, calls it at each update.
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


def check_normalised(head: Type[Head], argument: str) -> None:
    """Refuse an argument that is for scores with one normaliser.

    Raises:
        UnsupportedError: the scores of ``head`` have several.
    """
    if not head.normalised:
        raise UnsupportedError(
            f"an output layer with one softmax, for `{argument}`",
            f"{head.__name__}, whose scores have no single normaliser",
            f'Use one softmax or a mixture of contexts ("moc"), or leave `{argument}` out.',
        )


SOFTCAP = Option(
    "logit_softcap",
    None,
    "c of a soft cap on the scores of an output layer with one softmax, c tanh(score / c); 30 in "
    "Gemma 2. It is a part of the model",
    type=Optional[float],
    argument="softcap",
)
