"""Losses by blocks and mixtures for models of transformers.

Their models hand finished logits, tokens x N, to the loss. :func:`fused_loss_` lets the output
layer hand on the hidden states instead while it trains, as :class:`HiddenStates`, and returns the
loss that takes them; in evaluation and generation the layer returns logits as before.

Note [One scale]
----------------
The objective is that of the criterions of this package,

    1/T sum_t -log p(y_t)  +  sum_i weight_i R_i,

with the R of each paper and T, the number of tokens of an optimiser's step. A weight so means the
same for every batch size. Where a step has several batches (gradient accumulation, workers), each
adds the penalty times its own share of the tokens, so that the penalty counts once.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence, Tuple, Type, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectral_fairseq.embeddings.table import Table
from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.functional.dispersion import dispersion_penalty
from spectral_fairseq.functional.softmax_loss import blockwise_cross_entropy, smoothing_weights
from spectral_fairseq.heads import MixtureOfContexts, MixtureOfSoftmaxes
from spectral_fairseq.heads.mixture import MixtureHead
from spectral_fairseq.training.hidden_states import HandsOn, HiddenStates
from spectral_fairseq.training.modules import (
    Changed,
    check_whole,
    is_of_peft,
    keep_layers,
    let_replace,
    output_layer,
    put_on,
    take_off,
    unwrapped,
)
from spectral_fairseq.training.tables import TableUse, take_tables_off

SMOOTHINGS = ("torch", "fairseq")
MIXTURES: Dict[str, Type[MixtureHead]] = {"mos": MixtureOfSoftmaxes, "moc": MixtureOfContexts}
IGNORED = -100  # the label of transformers for what is no target


class Mixes(Changed):
    """An output layer whose scores are the log-probabilities of its ``mixture``."""

    order = 1
    mixture: MixtureHead

    def forward(self, input: Tensor) -> Tensor:
        """log P of features, shape (*, d): shape (*, N)."""
        scores: Tensor = self.mixture(input)
        return scores


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
        return _operands(self.__dict__["_layer"][0], features)

    def vectors(self, words: Tensor) -> Tensor:
        return F.embedding(words, self.weight)


def _operands(layer: nn.Module, features: Tensor) -> Tuple[Tensor, Tensor]:
    """(x, M) such that x M' are the logits of features, without the bias."""
    if isinstance(layer, TableUse):
        return layer.used_table.operands(features)
    weight: Any = layer.weight
    return features, weight


class TokenLoss:
    """The loss that :func:`fused_loss_` returns; a model of transformers calls it by itself.

    It counts tokens as Trainer does: the sum over the targets, divided by ``num_items_in_batch``,
    which covers all batches of an optimiser's step; or by the number of targets where that is not
    given. Without any target it is 0, and so are its gradients. The load-balancing loss of a
    mixture of experts is added as the model adds it, by its share of the tokens.

    Args:
        model: whose output layer hands on hidden states.
        label_smoothing: eps in [0, 1).
        smoothing: ``torch`` gives each of the N words eps / N, as ``F.cross_entropy`` and Trainer
            do; ``fairseq`` gives eps / (N - 1) to each word but the target, as its
            ``label_smoothed_cross_entropy`` does.
        penalty: called without arguments, returns the weighted sum of penalties; such as a
            :class:`~spectral_fairseq.training.penalties.TablePenalty`. It is added in training
            only, see Note [One scale].
        dispersion: weight of :func:`~spectral_fairseq.functional.dispersion.dispersion_penalty`
            of the (decoder's) layers, over the positions that have a target; likewise. The model
            has to return its hidden states: ``model.config.output_hidden_states = True``.
        shift: whether the target of a position is the label of the next one. ``None`` does as the
            own loss of a model of transformers does.
        ignore_index: label of what is no target.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        label_smoothing: float = 0.0,
        smoothing: str = "torch",
        penalty: Optional[Callable[[], Tensor]] = None,
        dispersion: float = 0.0,
        shift: Optional[bool] = None,
        ignore_index: int = IGNORED,
    ) -> None:
        smoothing_weights(label_smoothing, vocabulary=2)
        if not 0 <= dispersion < math.inf:
            raise ConfigurationError(
                "`dispersion` to be a finite number >= 0", f"{dispersion}", "Correct it."
            )
        if smoothing not in SMOOTHINGS:
            raise ConfigurationError(
                f"`smoothing` to be one of {', '.join(SMOOTHINGS)}", repr(smoothing), "Correct it."
            )
        self.label_smoothing, self.smoothing = label_smoothing, smoothing
        self.penalty, self.dispersion = penalty, dispersion
        self.shift = _shifts(model) if shift is None else shift
        self.ignore_index = ignore_index
        self.auxiliary = _Auxiliary.of(unwrapped(model))

    def __call__(
        self, outputs: Any, labels: Optional[Tensor], num_items_in_batch: Any = None
    ) -> Tensor:
        """The loss of a batch, a scalar.

        Args:
            outputs: of the model, with ``logits`` (an attribute, an entry, or the first element).
            labels: shape (B, T).
            num_items_in_batch: number of targets of the optimiser's step.

        Raises:
            ConfigurationError: there are no labels, or other logits than the output layer's.
        """
        if labels is None:
            raise ConfigurationError(
                "`labels` beside the outputs of the model, for a loss of spectral_fairseq.training",
                "none",
                "Let the data collator give labels.",
            )
        # Where outputs are a tuple that has it, it stands before the logits.
        further = 0.0 if self.auxiliary is None else self.auxiliary(outputs)
        logits = _logits(outputs)
        if self.shift:
            labels = self._shifted(labels)
        loss, share = self.of_logits(logits, labels, num_items_in_batch)
        if isinstance(further, Tensor):
            loss = loss + further * share
        if self.dispersion and isinstance(logits, HiddenStates):
            spread = dispersion_penalty(_layers(outputs), labels.ne(self.ignore_index))
            loss = loss + self.dispersion * spread * share
        return loss

    def _shifted(self, labels: Tensor) -> Tensor:
        """The label of the next position at each, so that nothing has to be cut out of logits."""
        return F.pad(labels, (0, 1), value=self.ignore_index)[..., 1:]

    def of_logits(
        self, logits: Any, labels: Tensor, num_items_in_batch: Any
    ) -> Tuple[Tensor, Tensor]:
        """The loss with the penalties on the table, and the share of a step's tokens in the batch.

        Args:
            logits: hidden states in training, or finished logits, shape (B, T, N).
            labels: that of each position, shape (B, T).
            num_items_in_batch: as for :meth:`__call__`.
        """
        targets = labels.reshape(-1).to(logits.device)
        counted = targets.ne(self.ignore_index).sum()
        of_words = self._of_hidden_states if isinstance(logits, HiddenStates) else self._of_logits
        loss = of_words(logits, targets)
        total = counted if num_items_in_batch is None else num_items_in_batch
        total = torch.as_tensor(total, device=loss.device).clamp(min=1)
        share = counted.to(loss.device) / total
        loss = loss / total
        if self.penalty is not None and isinstance(logits, HiddenStates):
            loss = loss + self.penalty() * share
        return loss, share

    def _fairseqs_smoothing(self, words: int) -> float:
        """eps as fairseq spreads it, for N words."""
        return self.label_smoothing * ((words - 1) / words if self.smoothing == "torch" else 1.0)

    def _of_hidden_states(self, handed: HiddenStates, targets: Tensor) -> Tensor:
        layer = handed.layer
        for parameter in layer.parameters():
            check_whole(parameter)
        features = handed.features.flatten(0, -2)  # [T, d]
        if handed.is_scaled:
            features = features * handed.scale
        bias = None if layer.bias is None else layer.bias * handed.scale
        if handed.bias is not None:
            bias = handed.bias if bias is None else bias + handed.bias
        dtype = handed.product_dtype
        smoothing = self._fairseqs_smoothing(layer.out_features)
        chosen: Any = {"label_smoothing": smoothing, "ignore_index": self.ignore_index}
        # A 16-bit product of operands that are not all so is autocast's, which has ended.
        operands = [features, *layer.parameters()]
        if isinstance(layer, TableUse):
            operands += layer.used_table.parameters()
        autocast = dtype in (torch.float16, torch.bfloat16) and any(
            one.dtype != dtype for one in operands
        )
        device = features.device.type
        half = {"dtype": dtype} if autocast else {"enabled": False}
        with torch.autocast(device, **half):
            if not isinstance(layer, Mixes):
                rows, matrix = _operands(layer, features)
                return blockwise_cross_entropy(rows, targets, matrix, bias, **chosen)[0]
            if handed.is_scaled or (bias is not None and bool(bias.any())):
                raise UnsupportedError(
                    "a model that leaves its logits as they are, for a mixture",
                    "one that scales them or adds a bias to them",
                    "Train this model without mixture_.",
                )
            mixture: Any = layer.mixture
            return mixture.loss(features, targets, **chosen)[0]  # type: ignore[no-any-return]

    def _of_logits(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The same of finished logits, by words."""
        logits = logits.flatten(0, -2)
        words = logits.size(-1)
        lost = targets[targets.ne(self.ignore_index)]
        if lost.numel() and int(lost.max()) >= words:
            raise ConfigurationError(
                f"labels below the width of the logits, {words}",
                f"{int(lost.max())}",
                "Return the outputs of the model as they are, so that hidden states keep their "
                "type; DistributedDataParallel with find_unused_parameters does not.",
            )
        log_p = torch.log_softmax(
            logits.double() if logits.dtype == torch.double else logits.float(), -1
        )
        target_weight, uniform = smoothing_weights(self._fairseqs_smoothing(words), words)
        loss = target_weight * F.nll_loss(
            log_p, targets, ignore_index=self.ignore_index, reduction="sum"
        )
        if uniform:
            loss = loss - uniform * log_p[targets.ne(self.ignore_index)].sum()
        return loss


class ModelLoss:
    """A :class:`TokenLoss` in the place of a model's ``loss_function``.

    The model so computes it where it is given labels, which is what Trainer, TRL, accelerate and
    peft do. It adds the loss of its experts itself.

    Args:
        loss: the loss.
        own: the function that the model had.
    """

    def __init__(self, loss: TokenLoss, own: Any) -> None:
        self.loss, self.__name__ = loss, getattr(own, "__name__", "")

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
            targets = loss._shifted(labels) if loss.shift else labels
        if ignore_index is not None and ignore_index != loss.ignore_index:
            targets = targets.masked_fill(targets.eq(ignore_index), loss.ignore_index)
        return loss.of_logits(logits, targets, num_items_in_batch)[0]


def _take_over_loss(model: nn.Module, loss: TokenLoss) -> None:
    """Let a model of transformers compute this loss where it is given labels."""
    model = unwrapped(model)
    if isinstance(getattr(type(model), "loss_function", None), property):
        found: Any = model
        found.loss_function = ModelLoss(loss, found.loss_function)


class _Auxiliary(NamedTuple):
    """The load-balancing loss of a mixture of experts, which transformers adds beside labels only.

    Attributes:
        coefficient: its weight.
        asked: whether the model's settings ask for it; it can be asked for in a call as well.
    """

    coefficient: float
    asked: bool

    @classmethod
    def of(cls, model: nn.Module) -> Optional[_Auxiliary]:
        """That of a model; ``None`` if it has no such loss.

        Raises:
            UnsupportedError: the model's settings ask for a further loss, which is not known here.
        """
        config = getattr(model, "config", None)
        places = [model, config, *(getattr(config, name, None) for name in _PARTS_OF_CONFIG)]
        asked = any(getattr(place, "output_router_logits", False) for place in places)
        code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
        names = () if code is None else code.co_varnames
        others = [name for name in names if name.endswith(("aux_loss", "z_loss"))]
        found = [getattr(place, name, None) for place in places for name in _COEFFICIENTS]
        known = next((float(one) for one in found if isinstance(one, (int, float))), None)
        if asked and others and (known is None or others != ["aux_loss"]):
            raise UnsupportedError(
                "a model whose loss is that of its tokens, with the `aux_loss` of its experts",
                f"a {type(model).__name__}, which adds {', '.join(others)}",
                "Set model.config.output_router_logits = False, or use the model's own loss.",
            )
        return None if known is None or "aux_loss" not in others else cls(known, asked)

    def __call__(self, outputs: Any) -> Union[Tensor, float]:
        """The weighted loss of a batch."""
        found = getattr(outputs, "aux_loss", None)
        if found is not None:
            weighted: Tensor = self.coefficient * found
            return weighted
        if self.asked and isinstance(outputs, (tuple, Tensor, HiddenStates)):
            raise ConfigurationError(
                "outputs with the `aux_loss` of the experts, which the model's settings ask for",
                f"a {type(outputs).__name__}",
                "Pass the outputs of the model as they are, with return_dict=True.",
            )
        return 0.0


_PARTS_OF_CONFIG = ("text_config", "ffn_config")
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")


def _logits(outputs: Any) -> Any:
    if isinstance(outputs, (Tensor, HiddenStates)):
        return outputs
    if hasattr(outputs, "logits"):
        return outputs.logits
    return outputs["logits"] if isinstance(outputs, dict) else outputs[0]


def _layers(outputs: Any) -> Sequence[Tensor]:
    """The outputs of the layers, without the embeddings."""
    for name in ("decoder_hidden_states", "hidden_states"):
        states = getattr(outputs, name, None)
        if states is not None:
            return states[1:]  # type: ignore[no-any-return]
    raise ConfigurationError(
        "outputs with the hidden states of the layers, for `dispersion`",
        "none",
        "Set model.config.output_hidden_states = True.",
    )


def _shifts(model: nn.Module) -> bool:
    """Whether the model's own loss compares a position with the next one's label."""
    model = unwrapped(model)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    own = getattr(getattr(model, "loss_function", None), "__name__", "")
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is not None and "shift_logits" in code.co_varnames:  # a loss written there, as before
        return True  # transformers 4.50
    if own == "ForCausalLMLoss" and code is not None and "loss_function" in code.co_names:
        return True
    if own == "ForMaskedLMLoss" or type(model).__name__.endswith("ForMaskedLM"):
        return False
    raise ConfigurationError(
        "`shift` for a model that does not tell whether its targets are the next tokens",
        f"a {type(model).__name__}",
        "Pass shift=True where position t predicts labels[t + 1], and False where it predicts "
        "labels[t].",
    )


def fused_loss_(model: nn.Module, **options: Any) -> TokenLoss:
    """Let the output layer hand on hidden states in training, and return the loss that takes them.

    The loss goes through the tokens by blocks and never holds tokens x N scores.

    Args:
        model: of transformers, or any other whose output layer (an ``nn.Linear``, or one with a
            table or a mixture of this package) is the last thing that it does. It is changed in
            place; :func:`plain_` undoes it.
        **options: of :class:`TokenLoss`.

    Returns:
        The loss: in a loop, ``loss(model(input_ids), labels)``. A model of transformers that has a
        ``loss_function`` takes it over, so that ``model(input_ids, labels=labels).loss`` is it and
        Trainer needs nothing more; others are trained with
        ``Trainer(model, ..., compute_loss_func=fused_loss_(model))``.

    Raises:
        ConfigurationError: no output layer, or an option outside its range.
        UnsupportedError: an output layer of another kind, or one that is split over devices.
    """
    loss = TokenLoss(model, **options)
    layer = _linear(model, "fused_loss_")
    if not isinstance(layer, HandsOn):
        put_on(layer, HandsOn)
    _take_over_loss(model, loss)
    keep_layers(model)
    return loss


def mixture_(
    model: nn.Module,
    components: int,
    *,
    kind: str = "mos",
    dropout: float = 0.0,
    context_scale: float = 4.0,
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
        **options: of :class:`TokenLoss`.

    Raises:
        ConfigurationError: an option outside its range, or an output layer with a bias.
        UnsupportedError: as for :func:`fused_loss_`, or the layer has a mixture already.
    """
    if kind not in MIXTURES:
        raise ConfigurationError(
            f"`kind` to be one of {', '.join(MIXTURES)}", repr(kind), "Choose one of them."
        )
    loss = TokenLoss(model, **options)
    layer: Any = _linear(model, "mixture_")
    if isinstance(layer, Mixes):
        raise UnsupportedError("an output layer without a mixture", "one with it", "Keep that one.")
    if layer.bias is not None:
        raise ConfigurationError(
            "an output layer without a bias, for a mixture", "one with it", "Use another model."
        )
    parameter = next(layer.parameters(), None)
    parameter = next(model.parameters()) if parameter is None else parameter
    made = MIXTURES[kind](
        _TableOfLayer(layer), layer.in_features, components, dropout, context_scale=context_scale
    )
    layer.mixture = made.to(device=parameter.device, dtype=parameter.dtype).train(layer.training)
    put_on(layer, Mixes)
    if not isinstance(layer, HandsOn):
        put_on(layer, HandsOn)
    _take_over_loss(model, loss)
    keep_layers(model)
    return loss


def _linear(model: nn.Module, use: str) -> nn.Module:
    layer = output_layer(model)
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
    if not isinstance(layer, TableUse):
        check_whole(layer.weight)
    return layer


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
        if isinstance(layer, HandsOn):
            take_off(layer, HandsOn)
        if isinstance(layer.__dict__.get("_loss_function"), ModelLoss):
            del layer.__dict__["_loss_function"]
    let_replace(model)


def check_plain(model: nn.Module) -> None:
    """Refuse a model that :func:`plain_` cannot change.

    Raises:
        UnsupportedError: the model has a mixture, which no plain model can stand for, or a table
            whose entries are split over devices.
    """
    for layer in model.modules():
        if isinstance(layer, TableUse):
            _ = layer.used_table  # which is refused where it is split
        if isinstance(layer, Mixes):
            raise UnsupportedError(
                "a model that a plain one can stand for",
                "a mixture of softmaxes",
                "Save it as it is, and give a new model its mixture before loading.",
            )
