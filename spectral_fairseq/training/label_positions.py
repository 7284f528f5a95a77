"""Where the labels of a batch stand beside the outputs of a model."""

from __future__ import annotations

import inspect
import math
from typing import Any, Optional, Tuple

import torch.nn.functional as F
from torch import Tensor, nn

from spectral_fairseq.errors import ConfigurationError, listed
from spectral_fairseq.training.adapters import is_of_peft
from spectral_fairseq.training.hidden_states import HiddenStates
from spectral_fairseq.training.output_layer import without_wrappers


class LabelPositions:
    """Puts labels at the positions of a model's outputs that predict them.

    Args:
        model: whose outputs they are of.
        shift: whether the target of a position is the label of the next one. ``None`` does as the
            own loss of a model of transformers does.

    Raises:
        ConfigurationError: ``shift`` is ``None``, and the model does not tell.
    """

    def __init__(self, model: nn.Module, shift: Optional[bool]) -> None:
        self.shift = _shifts(model) if shift is None else shift
        prompt = getattr(model, "active_peft_config", None) if is_of_peft(model) else None
        self._virtual_tokens = int(getattr(prompt, "num_virtual_tokens", None) or 0)

    def __call__(self, labels: Tensor, logits: Any, nothing: float) -> Tensor:
        """Labels, or their weights, at the positions that predict them.

        Args:
            labels: shape (B, T).
            logits: of the same positions, and of those of prompt tuning.
            nothing: stands where no label does.

        Raises:
            ConfigurationError: the outputs are of other positions.
        """
        missing = logits.shape[-2] - labels.size(-1) if len(logits.shape) > 2 else 0
        if missing and missing != self._virtual_tokens:
            raise _of_another_batch(labels, logits)
        if missing:  # the positions of prompt tuning come first, and have no labels
            labels = _padded(labels, (missing, 0), nothing)
        return self.predicted(labels, nothing)

    def predicted(self, labels: Tensor, nothing: float) -> Tensor:
        """What each position predicts: its own label, or that of the next one.

        Labels are moved, so that nothing has to be cut out of logits.

        Args:
            labels: of all positions, shape (B, T).
            nothing: what the last position predicts then.
        """
        return _padded(labels, (0, 1), nothing)[..., 1:] if self.shift else labels


def targets_at(labels: Tensor, logits: Any) -> Tensor:
    """The labels as indices where the outputs are, shape (T,).

    Raises:
        ConfigurationError: they are no indices, or not one for each of the T positions of the
            outputs.
    """
    if labels.is_floating_point():
        raise no_indices(labels)
    if labels.numel() != math.prod(logits.shape[:-1]):
        raise _of_another_batch(labels, logits)
    return labels.reshape(-1).to(logits.device).long()


def no_indices(labels: Tensor) -> ConfigurationError:
    """The error for labels that are probabilities or values, as for regression."""
    return ConfigurationError(
        "`labels` that are indices of words or of classes, whole numbers",
        f"numbers of type {labels.dtype}, as of several classes at once or regression",
        "Pass the index of each word, or train this model without fused_loss_.",
    )


def logits_of(outputs: Any) -> Any:
    """The logits, or the hidden states that stand for them, in what a model returned.

    Raises:
        ConfigurationError: it is a dictionary without logits.
    """
    if isinstance(outputs, (Tensor, HiddenStates)):
        return outputs
    if hasattr(outputs, "logits"):
        return outputs.logits
    if not isinstance(outputs, dict):
        return outputs[0]
    if "logits" not in outputs:
        raise ConfigurationError(
            "outputs of the model with `logits`",
            f"{type(outputs).__name__} with {listed([*outputs])}",
            "Pass the logits of the output layer themselves, such as outputs.prediction_logits.",
        )
    return outputs["logits"]


def _of_another_batch(labels: Tensor, logits: Any) -> ConfigurationError:
    positions = " x ".join(map(str, logits.shape[:-1]))
    return ConfigurationError(
        f"a label for each of the {positions} positions of the outputs",
        f"labels of shape {tuple(labels.shape)}",
        "Pass the labels of the batch that the model was given.",
    )


def _padded(values: Tensor, sides: Tuple[int, int], nothing: float) -> Tensor:
    """Labels or weights with ``nothing`` beside them; short types of labels do not hold it."""
    values = values if values.is_floating_point() else values.long()
    return F.pad(values, sides, value=nothing)


def _shifts(model: nn.Module) -> bool:
    """Whether the model's own loss compares a position with the next one's label."""
    model = without_wrappers(model)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    loss_name = getattr(getattr(model, "loss_function", None), "__name__", "")
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is not None and "shift_logits" in code.co_varnames:  # a loss written there, as before
        return True  # transformers 4.50
    if loss_name == "ForCausalLMLoss" and code is not None and "loss_function" in code.co_names:
        return True
    if loss_name == "ForMaskedLMLoss" or type(model).__name__.endswith("ForMaskedLM"):
        return False
    raise ConfigurationError(
        "`shift` for a model that does not tell whether its targets are the next tokens",
        f"a {type(model).__name__}",
        "Pass shift=True where position t predicts labels[t + 1], and False where it predicts "
        "labels[t].",
    )
