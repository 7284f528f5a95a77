"""A model of transformers that computes the loss of this package where it is given labels.

Trainer, TRL, accelerate and peft pass labels to the model. Most models hand them to their
``loss_function``, in whose place :class:`ModelLoss` stands. Others (T5, Marian) have a cross
entropy in their forward pass: :class:`ModelForward` takes the labels before it.
:class:`WatchedOutput` sees to it that nothing computes another loss from the weight of the output
layer.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from typing import Any, Dict

import torch
from torch import Tensor, nn

from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.training.hidden_states import HiddenStates, KeepsHiddenStates
from spectral_fairseq.training.label_positions import no_indices
from spectral_fairseq.training.layer_mixins import beyond_plain, refuse_replicas
from spectral_fairseq.training.output_layer import output_layer, without_wrappers
from spectral_fairseq.training.replaced_methods import StandIn, stand_in
from spectral_fairseq.training.token_loss import TokenLoss


class ModelLoss(StandIn):
    """A :class:`TokenLoss` in the place of a model's ``loss_function``.

    The model so computes it where it is given labels, which is what Trainer, TRL, accelerate and
    peft do. It adds the loss of its experts itself.
    """

    def __init__(self, loss: TokenLoss, usual: Any) -> None:
        self.loss, self.usual = loss, usual
        self.__name__ = getattr(usual, "__name__", "")
        self._names = [*inspect.signature(usual).parameters]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a batch, a scalar, with the arguments of transformers' own losses.

        Those of classifiers take the labels first, so the arguments are told by their names.
        """
        given = {**dict(zip(self._names, args)), **kwargs}
        logits, labels = given.get("logits", given.get("pooled_logits")), given.get("labels")
        if isinstance(labels, Tensor) and labels.is_floating_point():
            if isinstance(logits, HiddenStates):
                raise no_indices(labels)
            usual: Tensor = self.usual(*args, **kwargs)
            return usual
        loss, targets = self.loss, given.get("shift_labels")
        if targets is None:
            if labels is None:
                raise ConfigurationError("`labels` or `shift_labels`", "neither", "Give labels.")
            targets = loss.positions.predicted(labels, loss.ignore_index)
        ignore_index = given.get("ignore_index")
        if ignore_index is not None and ignore_index != loss.ignore_index:
            targets = targets.long().masked_fill(targets.eq(ignore_index), loss.ignore_index)
        return loss.of_logits(logits, targets, given.get("num_items_in_batch"))[0]


class ModelForward(StandIn):
    """Stands for the forward pass of a model that computes a cross entropy of its logits itself.

    The loss takes the labels that the model is given.
    """

    def __init__(self, model: nn.Module, loss: TokenLoss) -> None:
        self.model, self.loss = model, loss

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the model, by which Trainer chooses columns."""
        return inspect.signature(self.method(self.model, "forward"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs, with the loss where there are labels."""
        model: Any = self.model
        forward = self.method(model, "forward")
        if not isinstance(output_layer(model), KeepsHiddenStates):
            # The model is plain again, but accelerate has put this into a wrapper of its own.
            return forward(*args, **kwargs)
        bound = inspect.signature(forward).bind_partial(*args, **kwargs)
        kwargs = {**bound.arguments, **bound.arguments.get("kwargs", {})}
        kwargs.pop("kwargs", None)
        labels = kwargs.pop("labels", None)
        lacks_inputs = _lacks_decoder_inputs(model, kwargs)
        if labels is None:
            if lacks_inputs:
                raise ConfigurationError(
                    "`decoder_input_ids` or `labels` for an encoder-decoder model",
                    "neither, as where Trainer takes the labels out for compute_loss_func",
                    "Leave compute_loss_func out, since the model computes this loss itself; or "
                    "use DataCollatorForSeq2Seq(tokenizer, model=model).",
                )
            return forward(**kwargs)
        if lacks_inputs:
            shifted = _shifted_right(model, labels)
            kwargs["decoder_input_ids"] = shifted
            masks = model.config.model_type == "encoder-decoder"  # EncoderDecoderModel alone
            if masks and kwargs.get("decoder_attention_mask") is None:
                kwargs["decoder_attention_mask"] = shifted.ne(model.config.pad_token_id).long()
        if _turns_cache_off(type(model).forward):
            kwargs["use_cache"] = False
        total = kwargs.pop("num_items_in_batch", None)
        outputs = forward(**kwargs)
        loss = self.loss(outputs, labels, total)
        if isinstance(outputs, tuple):
            return (loss, *outputs)
        return type(outputs)(**{**outputs, "loss": loss})


def _lacks_decoder_inputs(model: Any, inputs: Dict[str, Any]) -> bool:
    reads_targets = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    names = ("decoder_input_ids", "decoder_inputs_embeds")
    return bool(reads_targets) and all(inputs.get(name) is None for name in names)


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


class WatchedOutput(StandIn):
    """Stands for ``get_output_embeddings``, which TRL's trainers call.

    Their fused forward pass and distillation multiply by the output layer's weight, and compute
    losses and measures of their own: they would leave out label smoothing, penalties, mixtures and
    soft caps without a word.

    Args:
        model: whose method it is.
        loss: that would be left out.
    """

    def __init__(self, model: nn.Module, loss: TokenLoss) -> None:
        self.model, self.loss = model, loss

    def __call__(self) -> Any:
        """The output layer.

        Raises:
            UnsupportedError: the caller computes another loss than this one in training, or takes
                the output layer for another one.
        """
        model: Any = self.model
        frame = sys._getframe(1)
        package = str(frame.f_globals.get("__name__", "")).split(".")[0]
        # Their constructors ask for the kind of the layer alone.
        if package == "trl" and frame.f_code.co_name != "__init__":
            self._check_known_to_trl()
        return self.method(model, "get_output_embeddings")()

    def _check_known_to_trl(self) -> None:
        layer: Any = output_layer(self.model)
        if not isinstance(layer, KeepsHiddenStates):
            return
        if beyond_plain(layer):
            raise UnsupportedError(
                "an output layer whose scores are W h + b, for a trainer of TRL",
                "a mixture or a soft cap, which is left out of all that the trainer computes from "
                "the weight: losses, entropies and accuracies",
                "Use Trainer.",
            )
        terms = self.loss.has_terms or self.loss.label_smoothing
        if terms and layer.training and torch.is_grad_enabled():
            raise UnsupportedError(
                "compute_loss_func=fused_loss_(model, ...) in TRL's trainer, for a loss with label "
                "smoothing, penalties or weights",
                "a trainer that computes a loss of its own from the output layer's weight",
                "Pass the loss as compute_loss_func to SFTTrainer, or use Trainer. A trainer with "
                "another objective, such as GRPOTrainer, takes fused_loss_(model) without these.",
            )


class _OneProcess(StandIn):
    """Stands for the method of a model that ``DataParallel`` copies it by."""

    __call__ = staticmethod(refuse_replicas)


def take_over_loss(model: nn.Module, loss: TokenLoss) -> None:
    """Let a model of transformers compute this loss where it is given labels."""
    inner: Any = without_wrappers(model)
    if not isinstance(getattr(type(inner), "loss_function", None), property):
        return
    usual = inner.loss_function
    usual = usual.usual if isinstance(usual, ModelLoss) else usual
    stand_in(inner, "_loss_function", ModelLoss(loss, usual))
    stand_in(inner, "get_output_embeddings", WatchedOutput(inner, loss))
    if _has_cross_entropy(inner):
        stand_in(inner, "forward", ModelForward(inner, loss))
        stand_in(inner, "_replicate_for_data_parallel", _OneProcess())


@functools.cache
def _turns_cache_off(forward: Any) -> bool:
    """Whether a forward pass has ``use_cache = False``, as Marian's where it is given labels."""
    steps = [*dis.get_instructions(inspect.unwrap(forward))]
    return any(
        value.argval is False and store.opname.startswith("STORE") and "use_cache" in store.argrepr
        for value, store in zip(steps, steps[1:])
    )


_USUAL = ("loss", "loss_fct", "lm_loss", "masked_lm_loss", "mlm_loss")


def _has_cross_entropy(model: nn.Module) -> bool:
    """Whether a model's forward pass has a cross entropy of its own, and no other loss."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is None or "loss_function" in code.co_names:
        return False
    other = [name for name in code.co_names if name.endswith("Loss") and name != "CrossEntropyLoss"]
    other += [name for name in code.co_varnames if name.endswith("loss") and name not in _USUAL]
    parts = [getattr(model, name, None) for name in code.co_names if name.endswith("loss_fct")]
    usual = "CrossEntropyLoss" in code.co_names or any(
        isinstance(part, nn.CrossEntropyLoss) for part in parts
    )
    return "labels" in code.co_varnames and usual and not other
