"""A model of transformers that computes the loss of this package where it is given labels.

Trainer, TRL, accelerate and peft pass labels to the model. Most models hand them to their
``loss_function``, in whose place :class:`ModelLoss` stands. Others (T5, Marian) have a cross
entropy in their forward pass: :class:`ModelForward` takes the labels before it.
:class:`WatchedOutput` sees to it that nothing computes another loss from the weight of the output
layer.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, Dict, Optional

import torch
from torch import Tensor, nn

from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.training.hidden_states import KeepsHiddenStates
from spectral_fairseq.training.modules import output_layer, without_wrappers
from spectral_fairseq.training.token_loss import MixtureLayer, TokenLoss


class ModelLoss:
    """A :class:`TokenLoss` in the place of a model's ``loss_function``.

    The model so computes it where it is given labels, which is what Trainer, TRL, accelerate and
    peft do. It adds the loss of its experts itself.

    Args:
        loss: the loss.
        own: the function that the model had.
    """

    def __init__(self, loss: TokenLoss, own: Any) -> None:
        self.loss, self.own = loss, own
        self.__name__ = getattr(own, "__name__", "")

    def __call__(
        self,
        logits: Any,
        labels: Optional[Tensor] = None,
        vocab_size: Any = None,  # noqa: ARG002 (transformers passes it by its place)
        num_items_in_batch: Any = None,
        ignore_index: Optional[int] = None,
        shift_labels: Optional[Tensor] = None,
        **_: Any,
    ) -> Tensor:
        """The loss of a batch, a scalar, with the arguments of transformers' own losses."""
        loss = self.loss
        if loss.dispersion:
            raise ConfigurationError(
                "the outputs of the layers, for `dispersion`",
                "labels that were given to the model, whose own loss sees the logits alone",
                "Pass compute_loss_func=fused_loss_(model, dispersion=...) to Trainer, or call the "
                "loss with the outputs and the labels.",
            )
        targets = shift_labels
        if targets is None:
            if labels is None:
                raise ConfigurationError("`labels` or `shift_labels`", "neither", "Give labels.")
            targets = loss.shifted(labels) if loss.shift else labels
        if ignore_index is not None and ignore_index != loss.ignore_index:
            targets = targets.masked_fill(targets.eq(ignore_index), loss.ignore_index)
        return loss.of_logits(logits, targets, num_items_in_batch)[0]


class ModelForward:
    """Stands for the forward pass of a model that computes a cross entropy of its logits itself.

    Args:
        model: whose forward pass it is.
        loss: takes the labels that the model is given.
    """

    def __init__(self, model: nn.Module, loss: TokenLoss) -> None:
        self.model, self.loss = model, loss
        self.own = model.__dict__.get("forward")  # of another package

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the model, by which Trainer chooses columns."""
        return inspect.signature(self.own or type(self.model).forward.__get__(self.model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs, with the loss where there are labels."""
        model: Any = self.model
        forward = self.own or type(model).forward.__get__(model)
        if not isinstance(output_layer(model), KeepsHiddenStates):
            # The model is plain again, but accelerate has put this into a wrapper of its own.
            return forward(*args, **kwargs)
        bound = inspect.signature(forward).bind_partial(*args, **kwargs)
        kwargs = {**bound.arguments, **bound.arguments.get("kwargs", {})}
        kwargs.pop("kwargs", None)
        labels = kwargs.pop("labels", None)
        if labels is None:
            if _reads_targets(model) and not _has_decoder_inputs(kwargs):
                raise ConfigurationError(
                    "`decoder_input_ids` or `labels` for an encoder-decoder model",
                    "neither, as where Trainer takes the labels out for compute_loss_func",
                    "Leave compute_loss_func out, since the model computes this loss itself; or "
                    "use DataCollatorForSeq2Seq(tokenizer, model=model).",
                )
            return forward(**kwargs)
        if _reads_targets(model) and not _has_decoder_inputs(kwargs):
            kwargs["decoder_input_ids"] = _shifted_right(model, labels)
        total = kwargs.pop("num_items_in_batch", None)
        outputs = forward(**kwargs)
        loss = self.loss(outputs, labels, total)
        if isinstance(outputs, tuple):
            return (loss, *outputs)
        return type(outputs)(**{**outputs, "loss": loss})


def _reads_targets(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _has_decoder_inputs(given: Dict[str, Any]) -> bool:
    names = ("decoder_input_ids", "decoder_inputs_embeds")
    return any(given.get(name) is not None for name in names)


def _shifted_right(model: Any, labels: Tensor) -> Tensor:
    """The decoder's inputs that a model makes of labels.

    Raises:
        UnsupportedError: it does not tell how.
    """
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    shift = getattr(sys.modules.get(type(model).__module__), "shift_tokens_right", None)
    if make is None and shift is not None:  # as M2M100 does in its forward pass
        config = model.config
        shifted: Tensor = shift(labels, config.pad_token_id, config.decoder_start_token_id)
        return shifted
    if make is None:
        found = f"none, and a {type(model).__name__} without prepare_decoder_input_ids_from_labels"
        raise UnsupportedError("`decoder_input_ids` beside the labels", found, "Give them.")
    made: Tensor = make(labels)
    return made


class WatchedOutput:
    """Stands for ``get_output_embeddings``, which TRL's fused forward pass calls.

    That pass multiplies by the output layer's weight and computes a cross entropy of its own: it
    would leave out label smoothing, penalties and mixtures without a word.

    Args:
        model: whose method it is.
        loss: that would be left out.
    """

    def __init__(self, model: nn.Module, loss: TokenLoss) -> None:
        self.model, self.loss = model, loss

    def __call__(self) -> Any:
        """The output layer.

        Raises:
            UnsupportedError: the caller computes another loss than this one in training.
        """
        model: Any = self.model
        caller = sys._getframe(1).f_locals
        if caller.get("fused_lm_head") is True and torch.is_grad_enabled() and self._is_another():
            raise UnsupportedError(
                "compute_loss_func=fused_loss_(model, ...) in TRL's trainer, for a loss with label "
                "smoothing, penalties or another output layer",
                "a trainer that computes a cross entropy of its own from the output layer's weight",
                "Pass the loss as compute_loss_func to SFTTrainer, or use Trainer.",
            )
        return type(model).get_output_embeddings(model)

    def _is_another(self) -> bool:
        layer: Any = output_layer(self.model)
        if not (isinstance(layer, KeepsHiddenStates) and layer.training):
            return False
        changed = isinstance(layer, MixtureLayer) or "softcap" in layer.__dict__
        return bool(changed or self.loss.has_terms or self.loss.label_smoothing)


def take_over_loss(model: nn.Module, loss: TokenLoss) -> None:
    """Let a model of transformers compute this loss where it is given labels."""
    model = without_wrappers(model)
    if not isinstance(getattr(type(model), "loss_function", None), property):
        return
    found: Any = model
    own = found.loss_function
    found.loss_function = ModelLoss(loss, own.own if isinstance(own, ModelLoss) else own)
    found.__dict__["get_output_embeddings"] = WatchedOutput(model, loss)
    if isinstance(found.__dict__.get("forward"), ModelForward):
        found.__dict__["forward"].loss = loss
    elif _has_cross_entropy(model):
        found.__dict__["forward"] = ModelForward(model, loss)


def give_back_loss(part: nn.Module) -> None:
    """Undo :func:`take_over_loss`."""
    if isinstance(part.__dict__.get("_loss_function"), ModelLoss):
        del part.__dict__["_loss_function"]
    if isinstance(part.__dict__.get("get_output_embeddings"), WatchedOutput):
        del part.__dict__["get_output_embeddings"]
    forward = part.__dict__.get("forward")
    if isinstance(forward, ModelForward):
        del part.__dict__["forward"]
        if forward.own is not None:
            part.__dict__["forward"] = forward.own


_USUAL = ("loss", "loss_fct", "lm_loss", "masked_lm_loss", "mlm_loss")


def _has_cross_entropy(model: nn.Module) -> bool:
    """Whether a model's forward pass has a cross entropy of its own, and no other loss."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is None or "loss_function" in code.co_names:
        return False
    other = [one for one in code.co_names if one.endswith("Loss") and one != "CrossEntropyLoss"]
    other += [one for one in code.co_varnames if one.endswith("loss") and one not in _USUAL]
    parts = [getattr(model, name, None) for name in code.co_names if name.endswith("loss_fct")]
    usual = "CrossEntropyLoss" in code.co_names or any(
        isinstance(part, nn.CrossEntropyLoss) for part in parts
    )
    return "labels" in code.co_varnames and usual and not other
