"""``--loss-form``: the scores of all words at once, as fairseq makes them, or block by block.

Both give the same likelihood up to rounding. The blocks take less memory, and on a CPU less time
too: the scores of a batch are freed and faulted in anew at every update. Which form is faster on a
GPU has not been measured, so there only scores that would fill it up are cut into blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from fairseq.models import BaseFairseqModel, FairseqDecoder, FairseqEncoderDecoderModel
from fairseq.models import lstm as fairseq_lstm
from fairseq.models import transformer as fairseq_transformer
from torch import nn

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.heads.head import Head
from spectral_fairseq.options import Option
from spectral_fairseq.plugin.likelihood.base import calls_output_layer
from spectral_fairseq.plugin.models.find import decoder_of, head_of, output_table

FORMS = ("auto", "blockwise", "dense")
LOSS_FORM = Option(
    "loss_form",
    "auto",
    "how the softmax's loss is computed: 'dense' holds the scores of tokens x words, 'blockwise' "
    "never does and is equal up to rounding, 'auto' takes blocks on a CPU, and elsewhere where the "
    "scores would not fit, unless something needs the scores. With 'auto' mixtures and the "
    "adaptive softmax take losses of their own, which hold no such scores either",
    choices=FORMS,
)
BLOCKWISE_LOSS = Option("blockwise_loss", False, "the same as --loss-form blockwise")

# Of a GPU's memory, for the scores, their log-probabilities and the gradient, in float32.
SHARE, COPIES, BYTES = 1 / 3, 3, 4


def asked_form(options: Any) -> str:
    """The form that both flags ask for.

    Raises:
        ConfigurationError: they contradict each other.
    """
    form = str(options.loss_form)
    if options.blockwise_loss and form == "dense":
        raise ConfigurationError(
            "one form of the loss", "--blockwise-loss and --loss-form dense", "Drop one of them."
        )
    return "blockwise" if options.blockwise_loss else form


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


def form_for(criterion: Any, options: Any, model: nn.Module, num_words: int) -> LossForm:
    """The form for a model, in training and in evaluation.

    Args:
        criterion: the criterion that takes the loss.
        options: the parsed values of the likelihood's flags.
        model: what is trained or evaluated.
        num_words: N, the size of the target dictionary.
    """
    asked = asked_form(options)
    if asked != "auto":
        return LossForm(asked == "blockwise", "as the flags ask for")
    if options.gradient_gating:
        return LossForm(False, "--gradient-gating needs the scores of all words")
    head = head_of(model)
    if getattr(head, "own_loss", False):
        return LossForm(True, f"{type(head).__name__} has a loss of its own")
    if criterion.report_accuracy:
        return LossForm(False, "--report-accuracy needs the scores of all words")
    obstacle = obstacle_to_blocks(model, num_words)
    if obstacle is not None:
        return LossForm(False, obstacle)
    device = next(model.parameters()).device
    if device.type == "cpu":
        return LossForm(True, "on a CPU this takes less time and memory")
    if device.type == "cuda":
        _, memory = torch.cuda.mem_get_info(device)  # all of it, used or not
        tokens = memory * SHARE // (num_words * COPIES * BYTES)
        return LossForm(True, "the scores of more would fill up the GPU", max(tokens, 1))
    return LossForm(False, f"blocks have not been tried on {device.type}")


# The decoders whose ``output_layer`` computes nothing but W h + b, or calls the head.
_OUTPUT_LAYERS = (
    fairseq_transformer.TransformerDecoderBase.output_layer,
    fairseq_lstm.LSTMDecoder.output_layer,
)
# The softmax of whatever the output layer returns.
_PROBABILITIES = (
    BaseFairseqModel,
    FairseqDecoder,
    FairseqEncoderDecoderModel,
    fairseq_transformer.TransformerModelBase,
)


def obstacle_to_blocks(model: nn.Module, num_words: int) -> Optional[str]:
    """Why blocks of scores might be another loss than that of this model's scores; or ``None``.

    Architectures of others may compute anything: those that are not known keep the dense form
    unless it is asked for.
    """
    decoder = decoder_of(model)
    name = type(decoder).__name__
    if not calls_output_layer(model):
        return f"{name} calls no output_layer"
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
        table = output_table(model, num_words)
    except ConfigurationError:
        return f"{name} has no single output table"
    plain = head is None or type(head) is nn.Linear
    if not plain or not isinstance(table, nn.Parameter):
        return f"the output layer of {name} is no plain one"
    return None
