"""Which likelihood a model is trained with, and in which form of the loss.

On a CPU blocks of scores take less time and memory. Which form is faster on a GPU has not been
measured, so there only scores that would fill it up are cut into blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from fairseq import models
from fairseq.models import lstm as fairseq_lstm
from fairseq.models import transformer as fairseq_transformer
from fairseq.models.bart import BARTModel
from fairseq.models.transformer_align import TransformerAlignModel
from torch import nn

from spectral_fairseq import refusals
from spectral_fairseq.errors import ConfigurationError, arguments_as_flags
from spectral_fairseq.functional.precision import HALVES
from spectral_fairseq.heads.head import Head
from spectral_fairseq.plugin.find import calls_output_layer, decoder_of, head_of, output_matrix
from spectral_fairseq.plugin.likelihood import (
    ADVERSARIAL_EPSILON,
    LOSS_FORM,
    RDROP_WEIGHT,
    Blockwise,
    FullScores,
    LikelihoodTerm,
)
from spectral_fairseq.plugin.objective import Parts

# Of a GPU's memory, for the scores, their log-probabilities and the gradient, in float32.
SHARE, COPIES, BYTES = 1 / 3, 3, 4

# On a CPU blocks of bfloat16 take less time from about d tokens on: they pass once more over the
# gradient of the table, N x d, to scale it (benchmarks/bench_loss_form.py).
TOKENS_PER_DIMENSION = 1


class LossForm(NamedTuple):
    """The form in which a model's loss is computed.

    Attributes:
        blockwise: take blocks of scores.
        why: the reason, as the end of a sentence.
        dense_up_to: number of tokens up to which a batch takes the dense form nevertheless.
    """

    blockwise: bool
    why: str
    dense_up_to: float = 0

    def __str__(self) -> str:
        if self.dense_up_to:
            return f"dense up to {self.dense_up_to:.0f} tokens and blockwise beyond: {self.why}"
        return f"{'blockwise' if self.blockwise else 'dense'}: {self.why}"


_ASKED = "as the flags ask for"


def form_for(criterion: Any, options: Any, model: nn.Module, num_words: int) -> LossForm:
    """The form of the plain likelihood for a model of N words, in training and in evaluation.

    Raises:
        UnsupportedError: the z-loss or the margin of scores that may not be those of a softmax.
    """
    asked, head = options.loss_form, head_of(model)
    obstacle = obstacle_to_blocks(model, num_words)
    if options.z_loss and obstacle is not None:
        raise refusals.Z_LOSS.error(obstacle)
    if options.z_loss and isinstance(head, Head) and not head.normalised:
        raise refusals.Z_LOSS.error(type(head).__name__)
    if options.adversarial_epsilon and obstacle is not None and asked == "auto":
        raise refusals.ADVERSARIAL.error(obstacle)
    if asked == "dense":
        return LossForm(False, _ASKED)
    if obstacle is not None and asked == "auto":
        return LossForm(False, obstacle)
    if criterion.report_accuracy:
        return LossForm(False, "--report-accuracy needs the scores of all words")
    if asked == "blockwise":
        return LossForm(True, _ASKED)
    if getattr(head, "own_loss", False):
        return LossForm(True, f"{type(head).__name__} has a loss of its own")
    parameter = next(model.parameters())
    device = parameter.device
    if device.type == "cpu":
        why = "on a CPU this takes less time and memory"
        if parameter.dtype not in HALVES:
            return LossForm(True, why)
        with torch.no_grad():
            dim = output_matrix(model, num_words).size(1)
        return LossForm(True, why, TOKENS_PER_DIMENSION * dim - 1)
    if device.type == "cuda":
        _, memory = torch.cuda.mem_get_info(device)  # all of it, used or not
        tokens = memory * SHARE // (num_words * COPIES * BYTES)
        return LossForm(True, "the scores of more would fill up the GPU", max(tokens, 1))
    return LossForm(False, f"blocks have not been tried on {device.type}")


def trained_form(options: Any, form: LossForm, head: Optional[nn.Module]) -> LossForm:
    """The form of the likelihood that is trained, where that of the plain one is ``form``."""
    if options.adversarial_epsilon:
        return LossForm(True, f"{ADVERSARIAL_EPSILON.flag} lowers the targets' scores in blocks")
    if not options.rdrop_weight or not form.blockwise:
        return form
    if getattr(head, "own_loss", False):
        found = f"{RDROP_WEIGHT.flag} needs the probabilities of all words of {type(head).__name__}"
        return LossForm(False, found)
    return form._replace(why=f"{RDROP_WEIGHT.flag} cuts every batch", dense_up_to=0)


# The decoders whose ``output_layer`` computes nothing but W h + b, or calls the head.
_OUTPUT_LAYERS = (
    fairseq_transformer.TransformerDecoderBase.output_layer,
    fairseq_lstm.LSTMDecoder.output_layer,
)
# The forward passes, of models and decoders, that return what the output layer does.
_FORWARD_PASSES = (
    models.FairseqEncoderDecoderModel.forward,
    models.FairseqLanguageModel.forward,
    fairseq_transformer.TransformerModelBase.forward,
    TransformerAlignModel.forward,
    BARTModel.forward,
    fairseq_lstm.LSTMModel.forward,
    fairseq_transformer.TransformerDecoderBase.forward,
    fairseq_lstm.LSTMDecoder.forward,
)
# The softmax of whatever the output layer returns.
_PROBABILITIES = (
    models.BaseFairseqModel,
    models.FairseqDecoder,
    models.FairseqEncoderDecoderModel,
    fairseq_transformer.TransformerModelBase,
)


def obstacle_to_blocks(model: nn.Module, num_words: int) -> Optional[str]:
    """Why blocks of scores might be another loss than that of this model's scores; or ``None``.

    Architectures of others may compute anything: those that are not known keep the dense form
    unless it is asked for.
    """
    decoder = decoder_of(model)
    name = type(decoder).__name__
    if not calls_output_layer(decoder):
        return f"{name} calls no output_layer"
    for owner in (model, decoder):
        forward = type(owner).forward
        if forward not in _FORWARD_PASSES and not forward.__module__.startswith(
            "spectral_fairseq."
        ):
            return f"{type(owner).__name__} has a forward pass of its own"
    head = head_of(model)
    if isinstance(head, Head):
        return None
    if getattr(type(decoder), "output_layer", None) not in _OUTPUT_LAYERS:
        return f"{name} has an output_layer of its own"
    for owner in (model, decoder):
        method = getattr(getattr(owner, "get_normalized_probs", None), "__func__", None)
        if method not in [vars(known).get("get_normalized_probs") for known in _PROBABILITIES]:
            return f"{type(owner).__name__} computes its probabilities in its own way"
    try:
        table = output_matrix(model, num_words)
    except ConfigurationError:
        return f"{name} has no single output table"
    plain = head is None or type(head) is nn.Linear
    if not plain or not isinstance(table, nn.Parameter):
        return f"the output layer of {name} is no plain one"
    return None


def likelihood_term(criterion: Any, parts: Parts, options: Any, form: LossForm) -> LikelihoodTerm:
    """The way that the flags and the model's output layer ask for, in training.

    The form is that of :func:`trained_form`. What no flag asks for is not imported.
    """
    if options.adversarial_epsilon:
        from spectral_fairseq.plugin.likelihood_adversarial import Adversarial

        return Adversarial(criterion, parts, options.adversarial_epsilon)
    if options.rdrop_weight:
        from spectral_fairseq.plugin.likelihood_consistency import Consistency

        return Consistency(criterion, parts, options.rdrop_weight, form.blockwise)
    return plain_likelihood(criterion, parts, form, options.z_loss)


def plain_likelihood(
    criterion: Any, parts: Parts, form: LossForm, z_loss: float = 0.0
) -> LikelihoodTerm:
    """The likelihood that is reported in evaluation, and trained where no method changes it.

    Raises:
        ConfigurationError: an output layer that cannot be replaced by blocks, or label smoothing
            where the output layer's own loss has none.
        UnsupportedError: a decoder without an output layer, for blocks; or a z-loss of output that
            is not scores.
    """
    if form.blockwise:
        _check_output_layer(parts)
        return Blockwise(criterion, parts, form.dense_up_to, z_loss)
    return FullScores(criterion, parts, z_loss)


def _check_output_layer(parts: Parts) -> None:
    """Refuse a model whose output layer cannot be replaced by blocks of scores."""
    if not isinstance(head_of(parts.decoder), Head):
        with arguments_as_flags(weight=LOSS_FORM.flag):
            _ = parts.output
    if not calls_output_layer(parts.decoder):
        raise refusals.NO_OUTPUT_LAYER.error(f"{type(parts.decoder).__name__}, which has none")
