"""The loss of a batch from the hidden states that an output layer hands on.

Note [One scale]
----------------
The objective is that of the criterions of this package,

    1/T sum_t -log p(y_t)  +  sum_i weight_i R_i,

with the R of each paper and T, the number of tokens of an optimiser's step. A weight so means the
same for every batch size. Where a step has several batches (gradient accumulation, workers), each
adds the penalty times its own share of the tokens, so that the penalty counts once.
"""

from __future__ import annotations

import operator
from typing import Any, Callable, Dict, Optional, Tuple, Type, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectral_fairseq.errors import (
    ConfigurationError,
    UnsupportedError,
    check_choice,
    check_range,
)
from spectral_fairseq.functional.blocks import check_label_smoothing, smoothing_weights
from spectral_fairseq.functional.log_probs import blockwise_log_probs
from spectral_fairseq.functional.precision import HALVES, widened
from spectral_fairseq.functional.softmax_loss import (
    Losses,
    blockwise_cross_entropy,
    check_token_weights,
    measured_cross_entropy,
)
from spectral_fairseq.functional.token_measures import TokenMeasures
from spectral_fairseq.heads.head import check_normalised
from spectral_fairseq.heads.mixture import MixtureHead
from spectral_fairseq.training.expert_losses import ExpertLosses
from spectral_fairseq.training.factored_layers import entries_of, operands
from spectral_fairseq.training.hidden_states import HiddenStates
from spectral_fairseq.training.joining import added_over_workers
from spectral_fairseq.training.label_positions import LabelPositions, logits_of, targets_at
from spectral_fairseq.training.layer_mixins import beyond_plain
from spectral_fairseq.training.mixture_layer import MixtureLayer
from spectral_fairseq.training.output_layer import output_layer, without_wrappers
from spectral_fairseq.training.penalties import TablePenalty
from spectral_fairseq.training.table_checks import check_not_sharded, check_trained, of_another

Result = TypeVar("Result")
SMOOTHINGS = ("torch", "fairseq")
IGNORED = -100  # the label of transformers for what is no target


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
        z_loss: lambda of the z-loss of ``functional/softmax_loss.py``, lambda (log Z)^2 for each
            target; 1e-4 is usual. It is added in training only. :attr:`mean_square` is for logs.
        penalty: called without arguments, returns the weighted sum of penalties; such as a
            :class:`~spectral_fairseq.training.penalties.TablePenalty`. It is added in training
            only, see Note [One scale].
        shift: whether the target of a position is the label of the next one. ``None`` does as the
            own loss of a model of transformers does.
        ignore_index: label of what is no target.
        by_probability: multiply the loss of each target by its probability, as a constant: dynamic
            fine-tuning, https://arxiv.org/abs/2508.05629. In training only.
        measures: keep :attr:`tokens` of each batch, by-products of the same pass.

    Attributes:
        positions: puts labels at the positions of the outputs that predict them.
        mean_square: mean of (log Z)^2 over the targets of the latest batch with a z-loss.
        tokens: log-probability and entropy of each target of the latest batch with ``measures``,
            and whether it is the most probable word, shape (B, T), at the position that predicts
            it; zero where there is no target.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        label_smoothing: float = 0.0,
        smoothing: str = "torch",
        z_loss: float = 0.0,
        penalty: Optional[Callable[[], Tensor]] = None,
        shift: Optional[bool] = None,
        ignore_index: int = IGNORED,
        by_probability: bool = False,
        measures: bool = False,
    ) -> None:
        check_label_smoothing(label_smoothing)
        check_choice("`smoothing`", smoothing, SMOOTHINGS)
        self.label_smoothing, self.smoothing = label_smoothing, smoothing
        check_range("`z_loss`", z_loss, at_least=0)
        self.z_loss = z_loss
        self.mean_square: Optional[Tensor] = None
        self.by_probability, self.measures = by_probability, measures
        self.tokens: Optional[TokenMeasures] = None
        # Of the latest batch: name of a figure for logs -> its sum over targets, and their number.
        self._sums: Dict[str, Tuple[Tensor, Tensor]] = {}
        if isinstance(penalty, TablePenalty):
            _take(penalty, model)
        self.penalty, self.model = penalty, model
        self.positions = LabelPositions(model, shift)
        self.ignore_index = ignore_index
        self.auxiliary = ExpertLosses.of(without_wrappers(model))
        layer = self._layer
        if isinstance(layer, MixtureLayer):
            self.check_mixture(type(layer.mixture))

    @property
    def _layer(self) -> Optional[nn.Module]:
        """The output layer as it is now: peft puts another one in its place and takes it away."""
        try:
            return output_layer(self.model)
        except ConfigurationError:  # a model whose logits are the loss's only concern
            return None

    def check_mixture(self, kind: Type[MixtureHead]) -> None:
        """Refuse terms and measures of this loss that a mixture does not give.

        Raises:
            UnsupportedError: it has such.
        """
        if self.z_loss:
            check_normalised(kind, "z_loss")
        if self.measures or self.by_probability:
            raise _of_plain_layers("weights or measures of tokens")

    def check_of(self, model: nn.Module) -> None:
        """Refuse another model than that of this loss.

        Raises:
            ConfigurationError: the output layer is none of the model's.
        """
        layer = self._layer
        if layer is not None:
            _check_has(model, layer, "fused_loss_")

    def __call__(
        self,
        outputs: Any,
        labels: Optional[Tensor],
        num_items_in_batch: Any = None,
        *,
        weights: Optional[Tensor] = None,
    ) -> Tensor:
        """The loss of a batch, a scalar.

        Args:
            outputs: of the model, with ``logits`` (an attribute, an entry, or the first element).
            labels: shape (B, T).
            num_items_in_batch: number of targets of the optimiser's step.
            weights: of the labels, shape (B, T), constants by which their losses are multiplied;
                the sum is divided as without them.

        Raises:
            ConfigurationError: there are no labels, or other logits than the output layer's.
        """
        if labels is None:
            wanted = "`labels` beside the outputs of the model"
            raise ConfigurationError(wanted, "none", "Let the data collator give labels.")
        # Where outputs are a tuple that has it, it stands before the logits.
        further = 0.0 if self.auxiliary is None else self.auxiliary(outputs)
        logits = logits_of(outputs)
        if weights is not None:
            check_token_weights(weights, labels)
            weights = self.positions(weights, logits, 0.0)
        labels = self.positions(labels, logits, self.ignore_index)
        loss, share = self.of_logits(logits, labels, num_items_in_batch, weights)
        if isinstance(further, Tensor):
            loss = loss + further * share
        return loss

    def log_probs(self, outputs: Any, labels: Tensor) -> TokenMeasures:
        """Log-probabilities of the targets, with a gradient, for losses that are functions of them.

        Such as those of reinforcement learning: the ratio to the policy that drew the tokens is
        ``(loss.log_probs(outputs, labels).log_probs - old).exp()``. Entropy and whether a target is
        the most probable word come with them. Nothing else of this loss is in it.

        Args:
            outputs: as for a call.
            labels: shape (B, T).

        Returns:
            Shape (B, T) each, as :attr:`tokens`.

        Raises:
            UnsupportedError: a mixture.
        """
        logits = logits_of(outputs)
        labels = self.positions(labels, logits, self.ignore_index)
        targets = targets_at(labels, logits)
        if not isinstance(logits, HiddenStates):
            log_p = torch.log_softmax(widened(logits.flatten(0, -2)), -1)
            return _shaped(self._measured(log_p, targets), labels)
        if isinstance(logits.layer, MixtureLayer):
            raise _of_plain_layers("log-probabilities of tokens")
        self._check_words(targets, logits.shape[-1])

        def compute(features: Tensor, bias: Any, cap: Any) -> TokenMeasures:
            rows, matrix = operands(logits.layer, features)
            options: Any = {"softcap": cap, "ignore_index": self.ignore_index}
            return blockwise_log_probs(rows, targets, matrix, bias, **options)

        return _shaped(self._of_operands(logits, compute), labels)

    def means(self, of_all_workers: bool = False) -> Dict[str, float]:
        """What the latest batch tells for logs: ``z_loss``, ``entropy`` and ``token_accuracy``.

        Args:
            of_all_workers: whether the means are over the batches of all workers of
                ``torch.distributed``, each of which then has to call this.
        """
        if not self._sums:
            return {}
        sums = torch.stack(
            [torch.stack(one).float() for one in zip(*self._sums.values())]
        )  # [2, n]
        if of_all_workers:
            sums = added_over_workers(sums)
        means = sums[0] / sums[1].clamp(min=1)
        return dict(zip(self._sums, means.tolist()))

    def of_logits(
        self,
        logits: Any,
        labels: Tensor,
        num_items_in_batch: Any,
        weights: Optional[Tensor] = None,
    ) -> Tuple[Tensor, Tensor]:
        """The loss with the penalties on the table, and the share of a step's tokens in the batch.

        Args:
            logits: hidden states in training, or finished logits, shape (B, T, N).
            labels: that of each position, shape (B, T).
            num_items_in_batch: as for :meth:`__call__`.
            weights: of each position, shape (B, T).
        """
        targets = targets_at(labels, logits)
        counted = targets.ne(self.ignore_index).sum()
        self._sums = {}
        if weights is not None:
            weights = weights.reshape(-1).to(logits.device)
        if isinstance(logits, HiddenStates):
            losses, tokens = self._of_hidden_states(logits, targets, weights)
            loss = losses.loss
            if self.z_loss:
                self.mean_square = losses.squares / counted.clamp(min=1)
                self._sums["z_loss"] = losses.squares, counted
        else:
            self._check_used()
            loss, tokens = self._of_logits(logits, targets, weights)
        if tokens is not None:
            self.tokens = _shaped(tokens, labels)
            self._sums["entropy"] = tokens.entropy.sum(), counted
            self._sums["token_accuracy"] = tokens.correct.sum(), counted
        total = counted if num_items_in_batch is None else num_items_in_batch
        total = torch.as_tensor(total, device=loss.device).clamp(min=1)
        share = counted.to(loss.device) / total
        loss = loss / total
        if self.penalty is not None and isinstance(logits, HiddenStates):
            loss = loss + self.penalty() * share
        return loss, share

    @property
    def has_terms(self) -> bool:
        """Whether it is more than the likelihood in training."""
        return bool(self.penalty is not None or self.z_loss or self.by_probability)

    def _check_used(self) -> None:
        """Refuse logits in training that did not come from the output layer's forward pass.

        Raises:
            UnsupportedError: they lack a term of the loss, or a part of the model.
        """
        layer = self._layer
        trained = without_wrappers(self.model) if layer is None else layer
        if not (trained.training and torch.is_grad_enabled()):
            return
        if self.has_terms or beyond_plain(layer):
            raise UnsupportedError(
                "hidden states from the output layer in training, for this loss",
                f"logits of a {type(self.model).__name__} that no layer of fused_loss_ made",
                "Make the loss of the model that is trained by fused_loss_ or mixture_, and let "
                "nothing else multiply by the output layer's weight.",
            )

    def _fairseqs_smoothing(self, words: int) -> float:
        """eps as fairseq spreads it, for N words."""
        return self.label_smoothing * ((words - 1) / words if self.smoothing == "torch" else 1.0)

    def _check_made_by(self, layer: nn.Module) -> None:
        """Refuse hidden states of another model, whose loss may have other terms."""
        if self._layer not in (layer, None) and not getattr(layer, "_is_replica", False):
            raise of_another("the outputs")

    def _of_operands(self, handed: HiddenStates, compute: Callable[..., Result]) -> Result:
        """What is computed of h, b and the cap of an output layer, with its own precision.

        Args:
            handed: of the layer.
            compute: takes h, shape (T, d), b or ``None``, and c or ``None``.
        """
        layer = handed.layer
        self._check_made_by(layer)
        entries = entries_of(layer)
        for entry in entries:
            check_not_sharded(entry)
        if not all(map(operator.is_, entries, handed.used.tensors)):
            raise UnsupportedError(
                "the parameters of the forward pass in the loss of its hidden states",
                "others, as where torch.func.functional_call has given the model its own for the "
                "one call",
                "Call the loss inside as well, in a module that has the model, or by giving a "
                "model of transformers its labels.",
            )
        features = handed.features.flatten(0, -2)  # [T, d]
        # tanh(s) c is c tanh(s c / c).
        outer = 1.0 if handed.cap is None else handed.cap
        if handed.is_scaled or outer != 1.0:
            features = features * (handed.scale * outer)
        bias = None if layer.bias is None else layer.bias * (handed.scale * outer)
        if handed.bias is not None:
            added = handed.bias * outer
            bias = added if bias is None else bias + added
        dtype = handed.dtype
        # A 16-bit product of operands that are not all so is autocast's, which has ended.
        autocast = dtype in HALVES and any(one.dtype != dtype for one in (features, *entries))
        half = {"dtype": dtype} if autocast else {"enabled": False}
        with torch.autocast(features.device.type, **half):
            return compute(features, bias, handed.cap)

    def _of_hidden_states(
        self, handed: HiddenStates, targets: Tensor, weights: Optional[Tensor]
    ) -> Tuple[Losses, Optional[TokenMeasures]]:
        layer = handed.layer
        self._check_words(targets, layer.out_features)
        chosen: Any = {
            "label_smoothing": self._fairseqs_smoothing(layer.out_features),
            "ignore_index": self.ignore_index,
            "z_loss": self.z_loss,
        }
        by_token: Any = {"weights": weights, "by_probability": self.by_probability}

        def compute(
            features: Tensor, bias: Any, cap: Any
        ) -> Tuple[Losses, Optional[TokenMeasures]]:
            rows, matrix = operands(layer, features)
            given, options = (rows, targets, matrix, bias), {**chosen, **by_token, "softcap": cap}
            if self.measures:
                return measured_cross_entropy(*given, **options)
            return blockwise_cross_entropy(*given, **options), None

        def of_mixture(features: Tensor, bias: Any, cap: Any) -> Tuple[Losses, None]:
            if handed.is_scaled or cap is not None or (bias is not None and bool(bias.any())):
                wanted = "a model that leaves its logits as they are, for a mixture"
                changes = "one that scales them, caps them or adds a bias to them"
                raise UnsupportedError(wanted, changes, "Train this model without mixture_.")
            if weights is not None:
                raise _of_plain_layers("weights of tokens")
            return layer.mixture.loss(features, targets, **chosen), None

        is_mixture = isinstance(layer, MixtureLayer)
        return self._of_operands(handed, of_mixture if is_mixture else compute)

    def _check_words(self, targets: Tensor, words: int) -> None:
        """Refuse labels that are none of so many words; a GPU, which would have to wait, does."""
        if targets.device.type == "cpu":
            remedy = (
                "Give the output layer a row for each word, by resize_token_embeddings before "
                "fused_loss_, or correct the labels."
            )
            self._check_indices(targets, words, remedy)

    def _check_indices(self, targets: Tensor, words: int, remedy: str) -> None:
        """Refuse labels, shape (T,), that are no indices of so many logits."""
        counted = targets[targets.ne(self.ignore_index)]
        if not counted.numel():
            return
        least, largest = counted.aminmax()
        ignored = f"Give what is no target the label {self.ignore_index}, or name its ignore_index."
        check_range("the smallest label", int(least), at_least=0, whole=True, remedy=ignored)
        what = "the largest label, an index within the width of the logits,"
        check_range(what, int(largest), below=words, whole=True, remedy=remedy)

    def _of_logits(
        self, logits: Tensor, targets: Tensor, weights: Optional[Tensor]
    ) -> Tuple[Tensor, Optional[TokenMeasures]]:
        """The same of finished logits, by words."""
        logits = logits.flatten(0, -2)
        words = logits.size(-1)
        counted = targets.ne(self.ignore_index)
        self._check_indices(
            targets,
            words,
            "Return the outputs of the model as they are, so that hidden states keep their "
            "type; DistributedDataParallel with find_unused_parameters does not.",
        )
        log_p = torch.log_softmax(widened(logits), -1)
        target_weight, uniform = smoothing_weights(self._fairseqs_smoothing(words), words)
        reduction = "sum" if weights is None else "none"
        loss = target_weight * F.nll_loss(
            log_p, targets, ignore_index=self.ignore_index, reduction=reduction
        )
        if weights is not None:
            if uniform:
                loss = loss - uniform * log_p.sum(-1)
            loss = (weights * loss)[counted].sum()
        elif uniform:
            loss = loss - uniform * log_p[counted].sum()
        if not self.measures:
            return loss, None
        return loss, TokenMeasures(*(one.detach() for one in self._measured(log_p, targets)))

    def _measured(self, log_p: Tensor, targets: Tensor) -> TokenMeasures:
        """The measures of tokens, of log-probabilities, shape (T, N)."""
        counted = targets.ne(self.ignore_index)
        log_probs = -F.nll_loss(log_p, targets, ignore_index=self.ignore_index, reduction="none")
        least = torch.finfo(log_p.dtype).min
        entropy = -(log_p.exp() * log_p.clamp(min=least)).sum(-1).detach()
        own = log_p.gather(1, targets.masked_fill(~counted, 0).unsqueeze(1)).squeeze(1)
        right = own.ge(log_p.amax(-1)) & counted
        return TokenMeasures(log_probs, entropy.masked_fill(~counted, 0), right)


def _shaped(tokens: TokenMeasures, labels: Tensor) -> TokenMeasures:
    return TokenMeasures(*(one.reshape(labels.shape) for one in tokens))


def _of_plain_layers(what: str) -> UnsupportedError:
    """The error for what a mixture does not give."""
    found, remedy = "a mixture", "Leave them out, or train this model without mixture_."
    return UnsupportedError(f"one softmax in the output layer, for {what}", found, remedy)


def _take(penalty: TablePenalty, model: nn.Module) -> None:
    """Bind a penalty to the model of a loss, or see that it is of that model.

    Raises:
        ConfigurationError: it is of another model, or of a frozen table.
    """
    if penalty.model is None:
        penalty.bind(model)
    elif isinstance(penalty.model, nn.Module):
        _check_has(model, output_layer(penalty.model), "TablePenalty")
    else:
        check_trained(penalty.model, model, "TablePenalty")
    if not penalty.is_trained:
        raise ConfigurationError(
            "an output table that is trained, for a penalty on it",
            "a frozen one, which it would not change",
            "Set its requires_grad before this, or leave the penalty out; what an adapter adds to "
            "a table is not penalised.",
        )


def _check_has(model: nn.Module, layer: nn.Module, what: str) -> None:
    if not any(layer is part for part in model.modules()):
        raise of_another(what)
