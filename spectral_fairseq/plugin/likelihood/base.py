"""What the ways to compute a batch's likelihood share."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator, NamedTuple, Tuple

from fairseq.models import FairseqDecoder
from torch import Tensor, nn

from spectral_fairseq import refusals
from spectral_fairseq.plugin.models.find import decoder_of, head_of
from spectral_fairseq.plugin.penalties.view import Parts, Term


class Likelihood(NamedTuple):
    """The likelihood term of the objective, before any penalty.

    Args:
        loss: to be differentiated; a scalar if reduced.
        logged_loss: what the logs show as the loss.
        logged_nll: the negative log-likelihood without label smoothing, for the logs.
        net_output: of the model; its first entry need not be the scores.
        measures: further values for the logs.
    """

    loss: Tensor
    logged_loss: Tensor
    logged_nll: Tensor
    net_output: Any
    measures: Tuple[Term, ...] = ()


class LikelihoodTerm:
    """A way to compute the label-smoothed likelihood.

    Args:
        criterion: the criterion that takes it: a ``label_smoothed_cross_entropy``.
        parts: of the model.
    """

    def __init__(self, criterion: Any, parts: Parts) -> None:
        self.criterion = criterion
        self.decoder, self.words = parts.decoder, parts.words
        self.head = head_of(parts.decoder)
        self.own_loss = bool(getattr(self.head, "own_loss", False))

    def check(self) -> None:
        """Refuse a model that cannot be trained so, before training starts.

        Raises:
            ConfigurationError: the model lacks what this term needs.
        """

    def __call__(self, model: nn.Module, sample: Any, reduce: bool) -> Likelihood:
        """Run the model.

        Args:
            model: in training mode, or with a head whose own loss is used in evaluation.
            sample: a batch as fairseq collates it.
            reduce: sum over the tokens.
        """
        raise NotImplementedError


# The likelihood from the scores of all words, as fairseq computes it.


class FullScores(LikelihoodTerm):
    """``label_smoothed_cross_entropy`` unchanged; it holds tokens x words scores."""

    def __call__(self, model: nn.Module, sample: Any, reduce: bool) -> Likelihood:
        """See the base class."""
        net_output = model(**sample["net_input"])
        loss, nll = self.criterion.compute_loss(model, net_output, sample, reduce=reduce)
        return Likelihood(loss, loss.detach(), nll.detach(), net_output)


# Access to a decoder's last layer while the model runs.


OutputLayer = Callable[[Tensor], Tensor]


@contextmanager
def output_layer_replaced(
    model: nn.Module, wrap: Callable[[OutputLayer], OutputLayer]
) -> Iterator[None]:
    """Let ``wrap(output_layer)`` stand for the decoder's ``output_layer`` inside the block.

    It is called within the model's own forward pass, so that data-parallel wrappers see every
    parameter used.

    Raises:
        ConfigurationError: the decoder does not end in an ``output_layer``.
    """
    check_output_layer(model)
    decoder: Any = decoder_of(model)
    decoder.output_layer = wrap(decoder.output_layer)
    try:
        yield
    finally:
        del decoder.output_layer


def calls_output_layer(model: nn.Module) -> bool:
    """Whether the decoder ends in an ``output_layer`` of its own."""
    output_layer = getattr(type(decoder_of(model)), "output_layer", None)
    # Decoders that never call one (fconv, lightconv) inherit fairseq's, which only raises.
    return callable(output_layer) and output_layer is not FairseqDecoder.output_layer


def check_output_layer(model: nn.Module) -> None:
    """Refuse a model whose output layer cannot be replaced.

    Raises:
        ConfigurationError: the decoder does not end in an ``output_layer``.
    """
    if not calls_output_layer(model):
        raise refusals.NO_OUTPUT_LAYER.error(f"{type(decoder_of(model)).__name__}, which has none")
