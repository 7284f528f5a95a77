"""The likelihood term of the objective: its flags, and the plain one, in two forms.

The plain likelihood is computed from the scores of all words at once, as fairseq makes them, or by
blocks. Both give the same likelihood up to rounding. The blocks take less memory, and on a CPU less
time too: the scores of a batch are freed and faulted in anew at every update. The z-loss is added
to either form; the other methods, which change the likelihood, are in the files likelihood_*.py,
and the choice among all is in likelihood_choice.py.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Callable, Dict, Iterator, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from spectral_fairseq import refusals
from spectral_fairseq.errors import arguments_as_flags
from spectral_fairseq.functional.adversarial_softmax import adversarial_margin
from spectral_fairseq.functional.precision import widened
from spectral_fairseq.functional.row_norms import row_norms
from spectral_fairseq.functional.softmax_loss import Losses, blockwise_cross_entropy
from spectral_fairseq.heads.head import Head
from spectral_fairseq.heads.softmax import SoftmaxHead
from spectral_fairseq.options import Option, read_options, weight_option
from spectral_fairseq.plugin.find import head_of
from spectral_fairseq.plugin.objective import SQUARED_LOG_Z, Parts, Term

LOSS_FORM = Option(
    "loss_form",
    "auto",
    "how the softmax's loss is computed: 'dense' holds the scores of tokens x words, 'blockwise' "
    "does not and is equal up to rounding, 'auto' takes blocks on a CPU, with R-Drop, and with "
    "CUDA where the scores would not fit; where something needs them, both hold them. With "
    "'auto' mixtures and the adaptive softmax take losses of their own, which hold no such scores "
    "either",
    choices=("auto", "blockwise", "dense"),
)


ADVERSARIAL_EPSILON = weight_option(
    "adversarial_epsilon", "in training a target's logit loses epsilon ||w_y|| ||h||"
)
DROPOUT = "dropout, by which its two passes differ"
RDROP_WEIGHT = Option(
    "rdrop_weight",
    0.0,
    "alpha of R-Drop: in training run each sentence twice, and penalise the divergence of the two "
    "distributions",
    at_least=0,
    needs=(DROPOUT,),
)
Z_LOSS = weight_option(
    "z_loss",
    "lambda of the z-loss, which adds lambda (log Z)^2 to a token's loss in training, with Z the "
    "sum of the exponentials of all scores; 1e-4 is usual",
)
FLAGS = (ADVERSARIAL_EPSILON, RDROP_WEIGHT, Z_LOSS, LOSS_FORM)
# Each changes the likelihood in a way of its own.
EXCLUSIVE = (ADVERSARIAL_EPSILON, RDROP_WEIGHT, Z_LOSS)


def options_of(cfg: Any) -> Any:
    """The parsed values of :data:`FLAGS`.

    Raises:
        ConfigurationError: a value outside its range, or flags that exclude each other.
    """
    options = read_options(FLAGS, cfg)
    used = [entry.flag for entry in EXCLUSIVE if getattr(options, entry.name)]
    if len(used) > 1:
        raise refusals.SEVERAL_METHODS.error(" and ".join(used))
    if options.adversarial_epsilon and options.loss_form == "dense":
        raise refusals.DENSE_ADVERSARIAL.error("--loss-form dense")
    return options


def drops(model: nn.Module) -> bool:
    """Whether any module of the model has a probability of dropping something."""
    settings = (item for module in model.modules() for item in vars(module).items())
    return any(
        (name == "p" or "drop" in name) and isinstance(value, (int, float)) and value > 0
        for name, value in settings
    )


class Likelihood(NamedTuple):
    """The likelihood term of the objective, before any penalty.

    Args:
        loss: what is differentiated; a scalar if reduced.
        logged_loss: what the logs show as the loss.
        logged_nll: the negative log-likelihood without label smoothing, for the logs.
        net_output: the model's output; its first entry need not be the scores.
        measures: further values for the logs.
    """

    loss: Tensor
    logged_loss: Tensor
    logged_nll: Tensor
    net_output: Any
    measures: Tuple[Term, ...] = ()


def measure(name: str, total: Tensor, sample: Any) -> Term:
    """The mean over the tokens of a batch, for the logs, of what is a part of the loss already."""
    return Term(name, 0.0, total.detach() / max(sample["ntokens"], 1))


class LikelihoodTerm:
    """A way to compute the label-smoothed likelihood.

    Args:
        criterion: the criterion that takes it: a ``label_smoothed_cross_entropy``.
        parts: what the model consists of.

    Attributes:
        flag: the flag that asks for this way; empty for the plain likelihood.
        makes_scores: whether it computes scores beside the model's output layer.
    """

    flag = ""
    makes_scores = False

    def __init__(self, criterion: Any, parts: Parts) -> None:
        self.criterion = criterion
        self.parts, self.decoder = parts, parts.decoder
        self.head = head_of(parts.decoder)
        self.own_loss = bool(getattr(self.head, "own_loss", False))

    def __call__(self, model: nn.Module, sample: Any, reduce: bool) -> Likelihood:
        """Run the model.

        Args:
            model: in training mode, or with a head whose own loss is used in evaluation.
            sample: a batch as fairseq collates it.
            reduce: sum over the tokens.
        """
        raise NotImplementedError

    @contextmanager
    def output_layer_replaced(self, stand_in: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Let ``stand_in`` take the place of the decoder's ``output_layer`` inside the block.

        It is called within the model's own forward pass, so that data-parallel wrappers see every
        parameter used. :func:`~.find.calls_output_layer` says whether a decoder calls it. Another
        thread, which may translate with the model, goes on with the decoder's own.
        """
        decoder: Any = self.decoder
        own, this_thread = decoder.output_layer, threading.get_ident()

        def output_layer(*given: Any, **options: Any) -> Any:
            chosen = stand_in if threading.get_ident() == this_thread else own
            return chosen(*given, **options)

        decoder.output_layer = output_layer
        try:
            yield
        finally:
            del decoder.output_layer

    def block_losses(
        self, features: Tensor, targets: Tensor, *, epsilon: float = 0.0, z_loss: float = 0.0
    ) -> Losses:
        """The losses that never hold the scores of tokens x words.

        Args:
            features: the input of the output layer, shape (b, t, d).
            targets: shape (b, t).
            epsilon: the radius of the adversarial softmax.
            z_loss: lambda of the z-loss.
        """
        options: Dict[str, Any] = {
            "z_loss": z_loss,
            "label_smoothing": self.criterion.eps,
            "ignore_index": self.criterion.padding_idx,
        }
        if isinstance(self.head, Head):
            return self.head.checked_loss(features, targets, epsilon=epsilon, **options)
        features, targets = features.flatten(0, -2), targets.flatten()
        rows, matrix, bias = self.softmax_operands(features)
        margin = None
        if epsilon:
            margin = adversarial_margin(features, row_norms(matrix[targets]), epsilon)
        return blockwise_cross_entropy(rows, targets, matrix, bias, margin=margin, **options)

    def softmax_operands(self, features: Tensor) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """(x, M, b) such that x M' + b are the logits of ``features``, of a model with one softmax.

        Args:
            features: the input of its output layer, shape (*, d).

        Returns:
            x, shape (*, d); M, shape (N, d); and the bias, shape (N,), if there is one.

        Raises:
            ConfigurationError: the model has no such table.
        """
        if self.parts.table is not None:
            rows, matrix = self.parts.table.operands(features)
            return rows, matrix, getattr(self.head, "bias", None)
        place = self.parts.output
        return features, place.matrix(), place.bias()


class FullScores(LikelihoodTerm):
    """``label_smoothed_cross_entropy``, and the z-loss if any; it holds tokens x words scores.

    Args:
        z_loss: lambda of the z-loss.

    Raises:
        UnsupportedError: a z-loss of output that is not scores with one normaliser.
    """

    def __init__(self, criterion: Any, parts: Parts, z_loss: float = 0.0) -> None:
        super().__init__(criterion, parts)
        self.z_loss = z_loss
        if z_loss and isinstance(self.head, Head) and not isinstance(self.head, SoftmaxHead):
            raise refusals.Z_LOSS.error(f"the probabilities of {type(self.head).__name__}")

    def __call__(self, model: nn.Module, sample: Any, reduce: bool) -> Likelihood:
        """See the base class."""
        net_output = model(**sample["net_input"])
        loss, nll = self.criterion.compute_loss(model, net_output, sample, reduce=reduce)
        if not self.z_loss:
            return Likelihood(loss, loss.detach(), nll.detach(), net_output)
        skip = self.criterion.ignore_prefix_size
        scores = net_output[0][:, skip:]
        real = sample["target"][:, skip:].ne(self.criterion.padding_idx)
        squares = torch.logsumexp(widened(scores), -1).square() * real  # [b, t]
        added = self.z_loss * (squares.sum() if reduce else squares.view_as(loss))
        losses = Losses(loss + added, loss, nll, squares.sum())
        return _with_logs(losses, net_output, sample, self.z_loss)


# The arguments that an output layer's own loss may refuse.
HEAD_FLAGS = {"label_smoothing": "--label-smoothing", "cutoffs": "--adaptive-softmax-cutoff"}


class Blockwise(LikelihoodTerm):
    """The loss of the output layer itself, taken where the scores would be made.

    Full scores are used where a caller asks for single tokens, and for small batches where that is
    said to be faster.

    Args:
        dense_up_to: number of tokens up to which a batch is small.
        z_loss: lambda of the z-loss.

    Raises:
        ConfigurationError: label smoothing where the output layer's own loss has none.
    """

    def __init__(
        self, criterion: Any, parts: Parts, dense_up_to: float = 0, z_loss: float = 0.0
    ) -> None:
        super().__init__(criterion, parts)
        self.dense_up_to, self.z_loss = dense_up_to, z_loss
        if isinstance(self.head, Head):
            with arguments_as_flags(**HEAD_FLAGS):
                self.head.check_label_smoothing(self.criterion.eps)

    @cached_property
    def _full_scores(self) -> FullScores:
        # Not before it is asked for: it refuses a z-loss that blocks can compute.
        return FullScores(self.criterion, self.parts, self.z_loss)

    def __call__(self, model: nn.Module, sample: Any, reduce: bool) -> Likelihood:
        """See the base class."""
        targets = sample["target"]
        if targets.numel() <= self.dense_up_to or not reduce:
            return self._full_scores(model, sample, reduce)
        skip = self.criterion.ignore_prefix_size

        def loss_instead(features: Tensor) -> Tensor:
            losses = self.block_losses(features[:, skip:], targets[:, skip:], z_loss=self.z_loss)
            return torch.stack(losses)

        with self.output_layer_replaced(loss_instead):
            net_output = model(**sample["net_input"])
        return _with_logs(Losses(*net_output[0]), net_output, sample, self.z_loss)


def _with_logs(losses: Losses, net_output: Any, sample: Any, z_loss: float) -> Likelihood:
    """The losses of a batch with what is logged of them."""
    measures = (measure(SQUARED_LOG_Z, losses.squares, sample),) if z_loss else ()
    plain, nll = losses.plain_loss.detach(), losses.nll.detach()
    return Likelihood(losses.loss, plain, nll, net_output, measures)
