"""Losses by blocks and mixtures for models of transformers.

Their models hand finished logits, tokens x N, to the loss. :func:`fused_loss_` lets the output
layer hand on the hidden states instead while it trains, as ``HiddenStates``, and returns the
loss that takes them; in evaluation and generation the layer returns logits as before.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple, Type

import torch.nn.functional as F
from torch import Tensor, nn

from spectral_fairseq.embeddings.table import Table
from spectral_fairseq.errors import ConfigurationError, UnsupportedError, check_choice, check_range
from spectral_fairseq.functional.settings import new_tensors_on
from spectral_fairseq.heads import MixtureOfContexts, MixtureOfSoftmaxes
from spectral_fairseq.heads.mixture import MixtureHead
from spectral_fairseq.training.adapters import is_of_peft, with_adapters
from spectral_fairseq.training.factored_layers import FactoredLayer, take_tables_off
from spectral_fairseq.training.hidden_states import AdaptedKeepsHiddenStates, KeepsHiddenStates
from spectral_fairseq.training.joining import is_split
from spectral_fairseq.training.layer_mixins import (
    beyond_plain,
    forward_of,
    is_passed_over,
    put_on,
    take_off,
)
from spectral_fairseq.training.mixture_layer import MixtureLayer
from spectral_fairseq.training.model_loss import take_over_loss
from spectral_fairseq.training.output_layer import output_layer, without_wrappers
from spectral_fairseq.training.replaced_methods import give_back, keep_layers
from spectral_fairseq.training.table_checks import check_not_sharded
from spectral_fairseq.training.token_loss import TokenLoss, operands

MIXTURES: Dict[str, Type[MixtureHead]] = {"mos": MixtureOfSoftmaxes, "moc": MixtureOfContexts}


class _TableOfLayer(Table):
    """The table of an output layer, for a mixture; the layer keeps its parameters."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = layer.out_features, layer.in_features
        self.__dict__["_layer"] = (layer,)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        weight: Tensor = self.__dict__["_layer"][0].weight
        return weight

    def _fill_constants(self) -> None:
        """Do nothing, since all rows count."""

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
        if _own_cap(model) is None:
            layer.softcap = float(softcap)
    return _handing_on(model, layer, loss)


def _handing_on(model: nn.Module, layer: nn.Module, loss: TokenLoss) -> TokenLoss:
    """Let the output layer hand on hidden states, and the model compute this loss of them."""
    if not isinstance(layer, KeepsHiddenStates):
        put_on(layer, AdaptedKeepsHiddenStates if is_of_peft(layer) else KeepsHiddenStates)
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
    loss.check_mixture(MIXTURES[kind])
    layer: Any = _linear(model, "mixture_")
    if isinstance(layer, MixtureLayer):
        raise UnsupportedError("an output layer without a mixture", "one with it", "Keep that one.")
    if layer.bias is not None:
        wanted = "an output layer without a bias, for a mixture"
        raise ConfigurationError(wanted, "one with it", "Use another model.")
    parameter = next(layer.parameters(), None)
    parameter = next(model.parameters()) if parameter is None else parameter
    scales: Any = {"context_scale": context_scale, "softcap": softcap}
    with new_tensors_on("meta" if parameter.is_meta else "cpu"):
        table = _TableOfLayer(layer)
        made = MIXTURES[kind](table, layer.in_features, components, dropout, **scales)
    layer.mixture = made.to(device=parameter.device, dtype=parameter.dtype).train(layer.training)
    put_on(layer, MixtureLayer)
    return _handing_on(model, layer, loss)


def _linear(model: nn.Module, use: str) -> nn.Module:
    layer: Any = output_layer(model)
    adapted = use == "fused_loss_" and is_of_peft(layer) and hasattr(layer, "lora_A")
    linear = getattr(layer, "base_layer", layer) if adapted else layer
    if not isinstance(linear, nn.Linear):
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
    _check_forward(linear, use)
    if not isinstance(linear, FactoredLayer):
        check_not_sharded(linear.weight)
    if adapted:
        with_adapters(layer, linear.weight)  # which may refuse
    return layer  # type: ignore[no-any-return]


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
    if is_passed_over(layer):
        raise UnsupportedError(
            f"an output layer that is called by the forward pass of its class, for {use}",
            "one whose attribute `forward` is another function, which would go on as before",
            "Delete that attribute, or use the model's own loss.",
        )


def plain_(model: nn.Module) -> None:
    """Take everything of :mod:`spectral_fairseq.training` off a model, without a trace.

    Tables become plain parameters again, tied as they were, and the output layer returns logits in
    training. Call it before the final ``save_pretrained``; the optimiser of a table cannot go on,
    and refuses its next step (torch 2.0).

    Raises:
        UnsupportedError: as :func:`check_plain`.
        ConfigurationError: ``model`` is a part of the model that uses a table.
    """
    check_plain(model)
    take_tables_off(model)
    for layer in model.modules():
        if isinstance(layer, KeepsHiddenStates):
            take_off(layer, KeepsHiddenStates)
    give_back(model)


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
        found = beyond_plain(layer)
        if found:
            raise UnsupportedError(
                "a model that a plain one can stand for",
                found,
                "Save it as it is, and do the same to a new model: mixture_ before its weights "
                "are loaded, fused_loss_ afterwards.",
            )
