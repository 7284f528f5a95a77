"""Losses by blocks and mixtures for models of transformers.

Their models hand finished logits, tokens x N, to the loss. :func:`fused_loss_` lets the output
layer hand on the hidden states instead while it trains, as ``HiddenStates``, and returns the
loss that takes them; in evaluation and generation the layer returns logits as before.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, Dict, Optional, Tuple, Type

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectral_fairseq.embeddings.table import Table
from spectral_fairseq.errors import ConfigurationError, UnsupportedError, check_choice, check_range
from spectral_fairseq.heads import MixtureOfContexts, MixtureOfSoftmaxes
from spectral_fairseq.heads.head import check_normalised
from spectral_fairseq.heads.mixture import MixtureHead
from spectral_fairseq.training.hidden_states import HiddenStates, KeepsHiddenStates
from spectral_fairseq.training.joining import is_split
from spectral_fairseq.training.modules import (
    check_not_sharded,
    forward_of,
    is_of_peft,
    keep_layers,
    let_replace,
    output_layer,
    put_on,
    take_off,
    without_wrappers,
)
from spectral_fairseq.training.tables import FactoredLayer, take_tables_off
from spectral_fairseq.training.token_loss import MixtureLayer, TokenLoss, operands, with_adapters

MIXTURES: Dict[str, Type[MixtureHead]] = {"mos": MixtureOfSoftmaxes, "moc": MixtureOfContexts}


class _TableOfLayer(Table):
    """The table of an output layer, for a mixture; the layer keeps its parameters."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = layer.out_features, layer.in_features
        self.without_padding()
        self.__dict__["_layer"] = (layer,)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        weight: Tensor = self.__dict__["_layer"][0].weight
        return weight

    def operands(self, features: Tensor) -> Tuple[Tensor, Tensor]:
        return operands(self.__dict__["_layer"][0], features)

    def vectors(self, words: Tensor) -> Tensor:
        return F.embedding(words, self.weight)


def fused_loss_(model: nn.Module, *, softcap: Optional[float] = None, **options: Any) -> TokenLoss:
    """Let the output layer hand on hidden states in training, and return the loss that takes them.

    The loss goes through the tokens by blocks and never holds tokens x N scores.

    Args:
        model: of transformers, or any other whose output layer (an ``nn.Linear``, or one with a
            table or a mixture of this package) is the last thing that it does. It is changed in
            place; :func:`plain_` undoes it.
        softcap: c of a cap c tanh(s / c) on its logits s. It becomes a part of the model, in
            training, evaluation and generation: give it again to a model that is loaded. ``None``
            leaves the model as it is; a cap of its own (``final_logit_softcapping`` of Gemma 2) is
            taken into account.
        **options: of :class:`TokenLoss`.

    Returns:
        The loss: in a loop, ``loss(model(input_ids), labels)``. A model of transformers takes it
        over, so that ``model(input_ids, labels=labels).loss`` is it and Trainer needs nothing more.
        SFTTrainer of TRL takes it as ``compute_loss_func``.

    Raises:
        ConfigurationError: no output layer, or an option outside its range.
        UnsupportedError: an output layer of another kind, or one that is split over devices.
    """
    loss = TokenLoss(model, **options)
    layer: Any = _linear(model, "fused_loss_")
    if softcap is not None:
        _check_cap(model, layer, softcap)
    if softcap is not None and _own_cap(model) is None:
        layer.softcap = float(softcap)
    return _handing_on(model, layer, loss)


def _handing_on(model: nn.Module, layer: nn.Module, loss: TokenLoss) -> TokenLoss:
    """Let the output layer hand on hidden states, and the model compute this loss of them."""
    if not isinstance(layer, KeepsHiddenStates):
        put_on(layer, KeepsHiddenStates)
    take_over_loss(model, loss)
    keep_layers(model)
    return loss


def _own_cap(model: nn.Module) -> Optional[float]:
    """The soft cap that the settings of a model of transformers have."""
    config = getattr(without_wrappers(model), "config", None)
    for part in (config, getattr(config, "text_config", None)):
        cap = getattr(part, "final_logit_softcapping", None)
        if cap is not None:
            return float(cap)
    return None


def _check_cap(model: nn.Module, layer: nn.Module, softcap: float) -> None:
    check_range("`softcap`", softcap, above=0)
    cap = _own_cap(model)
    if cap not in (None, softcap):
        wanted = f"`softcap` to be that of the model's settings, {cap:g}"
        raise ConfigurationError(wanted, f"{softcap:g}", "Leave it out.")
    if isinstance(layer, MixtureLayer):
        wanted, remedy = "no `softcap` for fused_loss_ on a mixture", "Pass it to mixture_."
        raise ConfigurationError(wanted, f"{softcap:g}", remedy)


def mixture_(
    model: nn.Module,
    components: int,
    *,
    kind: str = "mos",
    dropout: float = 0.0,
    context_scale: float = 4.0,
    softcap: Optional[float] = None,
    **options: Any,
) -> TokenLoss:
    """Make the output layer a mixture of softmaxes over its table, and return its loss by blocks.

    Args:
        model: as for :func:`fused_loss_`. Prior and contexts are new parameters of its output
            layer, ``mixture.prior`` and ``mixture.latent``: make the optimiser afterwards. No plain
            model computes the same, so a saved one is loaded into a model that has been given its
            mixture again.
        components: K, the number of experts.
        kind: ``mos`` or ``moc``, a mixture of contexts.
        dropout: of the contexts.
        context_scale: s of the contexts s tanh(.); 4 did well in Transformers, the paper's is 1.
        softcap: c of a cap on the scores, of ``moc`` alone; see :func:`fused_loss_`.
        **options: of :class:`TokenLoss`.

    Raises:
        ConfigurationError: an option outside its range, or an output layer with a bias.
        UnsupportedError: as for :func:`fused_loss_`, or the layer has a mixture already.
    """
    check_choice("`kind`", kind, MIXTURES)
    loss = TokenLoss(model, **options)
    if loss.z_loss:
        check_normalised(MIXTURES[kind], "z_loss")
    layer: Any = _linear(model, "mixture_")
    if isinstance(layer, MixtureLayer):
        raise UnsupportedError("an output layer without a mixture", "one with it", "Keep that one.")
    if layer.bias is not None:
        wanted = "an output layer without a bias, for a mixture"
        raise ConfigurationError(wanted, "one with it", "Use another model.")
    parameter = next(layer.parameters(), None)
    parameter = next(model.parameters()) if parameter is None else parameter
    scales: Any = {"context_scale": context_scale, "softcap": softcap}
    made = MIXTURES[kind](_TableOfLayer(layer), layer.in_features, components, dropout, **scales)
    layer.mixture = made.to(device=parameter.device, dtype=parameter.dtype).train(layer.training)
    put_on(layer, MixtureLayer)
    return _handing_on(model, layer, loss)


def _linear(model: nn.Module, use: str) -> nn.Module:
    layer: Any = output_layer(model)
    adapted = use == "fused_loss_" and is_of_peft(layer) and hasattr(layer, "lora_A")
    if adapted and isinstance(getattr(layer, "base_layer", None), nn.Linear):
        _check_forward(layer.base_layer, use)
        with_adapters(layer, layer.weight)  # which may refuse
        check_not_sharded(layer.weight)
        return layer  # type: ignore[no-any-return]
    if not isinstance(layer, nn.Linear):
        kind = type(layer)
        remedy = "Use the model's own loss."
        if is_of_peft(layer):
            remedy = (
                "Train the output layer as a whole (modules_to_save instead of target_modules), "
                "merge the adapter, or use the model's own loss."
            )
        raise UnsupportedError(
            f"an nn.Linear as the output layer, for {use}",
            f"a {kind.__module__}.{kind.__qualname__}",
            remedy,
        )
    _check_forward(layer, use)
    if not isinstance(layer, FactoredLayer):
        check_not_sharded(layer.weight)
    return layer


def _check_forward(layer: nn.Module, use: str) -> None:
    """Refuse a layer derived from ``nn.Linear`` that computes something else than W h + b.

    The loss takes its weight as it is, without what the layer does to it or to h: a factor (muP), a
    rounding (quantisation-aware training), or the lengths (cosine heads).
    """
    if forward_of(layer) is not nn.Linear.forward:
        kind = type(layer)
        raise UnsupportedError(
            f"an output layer whose forward pass is that of nn.Linear, for {use}",
            f"a {kind.__module__}.{kind.__qualname__}, which has its own",
            "Use the model's own loss.",
        )


def plain_(model: nn.Module) -> None:
    """Take everything of :mod:`spectral_fairseq.training` off a model, without a trace.

    Tables become plain parameters again, tied as they were, and the output layer returns logits in
    training. Call it before the final ``save_pretrained``; the optimiser cannot go on with them.

    Raises:
        UnsupportedError: as :func:`check_plain`.
        ConfigurationError: ``model`` is a part of the model that uses a table.
    """
    check_plain(model)
    take_tables_off(model)
    for layer in model.modules():
        if isinstance(layer, KeepsHiddenStates):
            take_off(layer, KeepsHiddenStates)
        give_back_loss(layer)
    let_replace(model)


def check_plain(model: nn.Module) -> None:
    """Refuse a model that :func:`plain_` cannot change.

    Raises:
        UnsupportedError: the model has a mixture or a soft cap that no plain model has, or a table
            whose entries are split over devices.
    """
    for layer in model.modules():
        if isinstance(layer, FactoredLayer) and is_split(layer.stored_table):
            raise UnsupportedError(
                "a table that every worker holds whole, for plain_",
                "a DTensor, split over devices",
                "Call plain_state_dict(model) on all workers, which gives the first one a plain "
                "state dict; or save_pretrained(folder), whose file has the plain weights.",
            )
    check_has_plain_form(model)


def check_has_plain_form(model: nn.Module) -> None:
    """Refuse a model that no plain one can stand for.

    Raises:
        UnsupportedError: it has a mixture or a soft cap.
    """
    for layer in model.modules():
        capped = "softcap" in layer.__dict__ and isinstance(layer, KeepsHiddenStates)
        if capped or isinstance(layer, MixtureLayer):
            raise UnsupportedError(
                "a model that a plain one can stand for",
                f"logits with the cap {layer.softcap:g}" if capped else "a mixture of softmaxes",
                "Save it as it is, and do the same to a new model: mixture_ before its weights "
                "are loaded, fused_loss_ afterwards.",
            )


# A model of transformers that computes the loss of this package where it is given labels.
#
# Trainer, TRL, accelerate and peft pass labels to the model. Most models hand them to their
# ``loss_function``, in whose place :class:`ModelLoss` stands. Others (T5, Marian) have a cross
# entropy in their forward pass: :class:`ModelForward` takes the labels before it.
# :class:`WatchedOutput` sees to it that nothing computes another loss from the weight of the output
# layer.


class ModelLoss:
    """A :class:`TokenLoss` in the place of a model's ``loss_function``.

    The model so computes it where it is given labels, which is what Trainer, TRL, accelerate and
    peft do. It adds the loss of its experts itself.
    """

    def __init__(self, loss: TokenLoss, own: Any) -> None:
        self.loss, self.own = loss, own
        self.__name__ = getattr(own, "__name__", "")
        self._names = [*inspect.signature(own).parameters]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a batch, a scalar, with the arguments of transformers' own losses.

        Those of classifiers take the labels first, so the arguments are told by their names.
        """
        given = {**dict(zip(self._names, args)), **kwargs}
        logits, labels = given.get("logits", given.get("pooled_logits")), given.get("labels")
        if isinstance(labels, Tensor) and labels.is_floating_point():
            if isinstance(logits, HiddenStates):
                raise ConfigurationError(
                    "`labels` that are indices of words or of classes, whole numbers",
                    f"numbers of type {labels.dtype}, as of several classes at once or regression",
                    "Train this model without fused_loss_.",
                )
            own: Tensor = self.own(*args, **kwargs)
            return own
        return self._of(
            logits,
            labels,
            given.get("num_items_in_batch"),
            given.get("ignore_index"),
            given.get("shift_labels"),
        )

    def _of(
        self,
        logits: Any,
        labels: Optional[Tensor],
        num_items_in_batch: Any,
        ignore_index: Optional[int],
        shift_labels: Optional[Tensor],
    ) -> Tensor:
        loss = self.loss
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

    The loss takes the labels that the model is given.
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
            shifted = _shifted_right(model, labels)
            kwargs["decoder_input_ids"] = shifted
            masks = model.config.model_type == "encoder-decoder"  # EncoderDecoderModel alone
            if masks and kwargs.get("decoder_attention_mask") is None:
                kwargs["decoder_attention_mask"] = shifted.ne(model.config.pad_token_id).long()
        total = kwargs.pop("num_items_in_batch", None)
        outputs = forward(**kwargs)
        loss = self.loss(outputs, labels, total)
        if isinstance(outputs, tuple):
            return (loss, *outputs)
        return type(outputs)(**{**outputs, "loss": loss})


def _reads_targets(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _has_decoder_inputs(inputs: Dict[str, Any]) -> bool:
    names = ("decoder_input_ids", "decoder_inputs_embeds")
    return any(inputs.get(name) is not None for name in names)


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
    """Stands for ``get_output_embeddings``, which the fused forward pass of TRL's trainers calls.

    That pass multiplies by the output layer's weight, and computes losses and measures of its own:
    it would leave out label smoothing, penalties, mixtures and soft caps without a word.

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
        if sys._getframe(1).f_locals.get("fused_lm_head") is True:
            self._check_known_to_trl()
        return type(model).get_output_embeddings(model)

    def _check_known_to_trl(self) -> None:
        layer: Any = output_layer(self.model)
        if not isinstance(layer, KeepsHiddenStates):
            return
        if isinstance(layer, MixtureLayer) or "softcap" in layer.__dict__:
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


def take_over_loss(model: nn.Module, loss: TokenLoss) -> None:
    """Let a model of transformers compute this loss where it is given labels."""
    inner: Any = without_wrappers(model)
    if not isinstance(getattr(type(inner), "loss_function", None), property):
        return
    original = inner.loss_function
    inner.loss_function = ModelLoss(
        loss, original.own if isinstance(original, ModelLoss) else original
    )
    inner.__dict__["get_output_embeddings"] = WatchedOutput(inner, loss)
    if isinstance(inner.__dict__.get("forward"), ModelForward):
        inner.__dict__["forward"].loss = loss
    elif _has_cross_entropy(inner):
        inner.__dict__["forward"] = ModelForward(inner, loss)


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
    other = [name for name in code.co_names if name.endswith("Loss") and name != "CrossEntropyLoss"]
    other += [name for name in code.co_varnames if name.endswith("loss") and name not in _USUAL]
    parts = [getattr(model, name, None) for name in code.co_names if name.endswith("loss_fct")]
    usual = "CrossEntropyLoss" in code.co_names or any(
        isinstance(part, nn.CrossEntropyLoss) for part in parts
    )
    return "labels" in code.co_varnames and usual and not other
