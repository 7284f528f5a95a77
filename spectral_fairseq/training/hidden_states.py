"""Hidden states in the place of logits, which an output layer hands on while it trains."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import Any, Dict, List, Optional, Tuple, Union

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from spectral_fairseq.errors import UnsupportedError, listed
from spectral_fairseq.functional.autograd import outside_graphs
from spectral_fairseq.functional.precision import type_of_products
from spectral_fairseq.functional.softcap import softcapped
from spectral_fairseq.training.factored_layers import entries_of
from spectral_fairseq.training.layer_mixins import LayerMixin, put_on


class _Refused(UnsupportedError, AttributeError):
    """An error that ``hasattr`` takes for an answer."""

    def __init__(self, found: str) -> None:
        super().__init__(
            "logits that a model leaves as they are, multiplies by a number, adds a bias to or "
            "gives a soft cap, before a loss of spectral_fairseq.training",
            f"`{found}`, which would change the hidden states",
            _remedy(),
        )

    def __reduce__(self) -> tuple:
        return UnsupportedError, (self.expected, self.found, self.remedy)


# Who asked for logits, by the module of a caller -> what to do about it.
_REMEDIES = (
    (
        ("torch.distributed.tensor",),
        "Keep the output layer whole: leave it out of the plan of parallelize_module, or train the "
        "model without fused_loss_.",
    ),
    (
        ("peft.tuners",),
        "Call fused_loss_ after get_peft_model, which has changed the output layer.",
    ),
    (
        ("transformers.trainer_pt_utils",),
        "Pass label_smoothing to fused_loss_, and no label_smoothing_factor to Trainer.",
    ),
    (
        ("trl.",),
        "Pass the loss as compute_loss_func=fused_loss_(model, ...) to TRL's trainer; one that "
        "takes none needs a model without fused_loss_.",
    ),
    (
        ("transformers.models.", "transformers.loss."),
        "Train this model without fused_loss_: it changes its logits itself, or computes another "
        "loss of them where it is given labels.",
    ),
    (
        ("transformers.trainer",),
        "Pass compute_loss_func=fused_loss_(model) to Trainer, so that it computes no other loss.",
    ),
)
_OF_USERS = (
    "Pass the outputs of the model to the loss as they are: loss(model(input_ids), labels). Where "
    "logits are needed, call the model under torch.no_grad(), or train it without fused_loss_."
)


def _remedy() -> str:
    """What helps whoever asked for logits: the nearest caller that is known, or else a user."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        for modules, remedy in _REMEDIES:
            if name.startswith(modules):
                return remedy
        if not name.startswith(("torch.", "spectral_fairseq.")) and name not in ("torch", ""):
            return _OF_USERS
        frame = frame.f_back
    return _OF_USERS


@dataclass(eq=False)
class Entries:
    """What an output layer computes with, as it was in a forward pass.

    DistributedDataParallel looks into the fields of dataclasses, and so learns which parameters a
    loss will use. Lightning gives the tensors among outputs another type (``bf16-true``), but
    leaves fields alone that are no arguments.
    """

    tensors: Tuple[Tensor, ...] = field(default=(), init=False)

    @classmethod
    def of(cls, layer: nn.Module) -> Entries:
        """Those of a layer."""
        made = cls()
        made.tensors = entries_of(layer)
        return made


@dataclass(eq=False)
class HiddenStates:
    """What an output layer hands on in the place of its logits s W h + b.

    What a model does to logits is done to these in a way that the loss knows of: conversions to
    another type (the loss has its own), products with a number, a bias for all words, and a soft
    cap c tanh(s / c) as Gemma 2 has it. Anything else is refused by name, since it would be done to
    hidden states.

    Attributes:
        features: h, shape (*, d).
        layer: with W, shape (N, d), and its own bias.
        dtype: that the logits would have; autocast ends before the loss.
        scale: s, which multiplies the layer's own bias too; a tensor, shape (), if it is learned.
        bias: b that the model adds, shape (N,), if any.
        cap: c where the model multiplies the tanh of all that by it, a soft cap.
        used: what the layer computes with, as it was in this forward pass.
    """

    features: Tensor
    layer: Any
    dtype: torch.dtype
    scale: Union[float, Tensor] = 1.0
    bias: Optional[Tensor] = None
    cap: Optional[float] = None
    used: Entries = field(default_factory=Entries)

    @property
    def shape(self) -> torch.Size:
        """Shape that the logits would have, (*, N)."""
        return torch.Size((*self.features.shape[:-1], self.layer.out_features))

    @property
    def is_scaled(self) -> bool:
        """Whether s may be another number than 1, now or after the next update."""
        return isinstance(self.scale, Tensor) or self.scale != 1.0

    @property
    def device(self) -> torch.device:
        """Device of the hidden states."""
        return self.features.device

    def float(self) -> HiddenStates:
        """Return self: the loss has a precision of its own."""
        return self

    def contiguous(self) -> HiddenStates:
        """Return self, which is contiguous where the loss reads it."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> HiddenStates:
        """Return self; another device is refused."""
        arguments = [*args, *kwargs.values()]
        devices = [
            torch.device(name) for name in arguments if isinstance(name, (str, torch.device))
        ]
        devices += [tensor.device for tensor in arguments if isinstance(tensor, Tensor)]
        for device in devices:  # "cuda" is this one too, whichever its number
            if device.type != self.device.type or device.index not in (None, self.device.index):
                raise _Refused("to another device")
        return self

    def __mul__(self, other: Any) -> HiddenStates:
        if isinstance(other, Tensor) and other.numel() != 1:
            raise _Refused("mul")
        if self.cap is not None:
            if isinstance(other, Tensor) or not other > 0:
                raise _Refused("mul behind tanh")
            return replace(self, cap=self.cap * float(other))
        bias = None if self.bias is None else self.bias * other
        learned = isinstance(other, Tensor) and other.requires_grad
        factor = other.reshape(()) if learned else float(other)
        return replace(self, scale=self.scale * factor, bias=bias)

    def __truediv__(self, other: Any) -> HiddenStates:
        return self * (1 / other)

    def __add__(self, other: Any) -> HiddenStates:
        words = self.layer.out_features
        # A column of so many numbers would be one for each position.
        one_each = isinstance(other, Tensor) and words == other.numel() == other.size(-1)
        if not one_each or self.cap is not None:
            raise _Refused("add")
        bias = other.flatten()
        return replace(self, bias=bias if self.bias is None else self.bias + bias)

    __rmul__, __radd__ = __mul__, __add__

    def tanh(self) -> HiddenStates:
        """Those of a soft cap, whose c the model multiplies by afterwards."""
        if self.cap is not None:
            raise _Refused("tanh")
        return replace(self, cap=1.0)

    def _refuse(self, *_: Any) -> Any:
        raise _Refused("an operator")

    # Python looks these up in the class alone, not in __getattr__.
    __getitem__ = __setitem__ = __iter__ = __len__ = __neg__ = __abs__ = _refuse
    __sub__ = __rsub__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse

    def __getattr__(self, name: str) -> Any:
        raise _Refused(name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What torch is asked to do with them and a tensor."""
        name = getattr(func, "__name__", str(func)).strip("_")
        if len(args) == 2 and not kwargs and name in ("add", "radd", "mul", "rmul"):
            this, other = args if isinstance(args[0], HiddenStates) else reversed(args)
            return this + other if "add" in name else this * other
        if name == "tanh" and len(args) == 1 and not kwargs:
            return args[0].tanh()
        raise _Refused(name)


def _flat(handed: HiddenStates) -> Tuple[List[Any], Any]:
    others = (handed.layer, handed.dtype, handed.cap, handed.used)
    return [handed.features, handed.bias, handed.scale], others


def _made(tensors: Any, others: Any) -> HiddenStates:
    features, bias, scale = tensors
    layer, dtype, cap, used = others
    return HiddenStates(features, layer, dtype, scale, bias, cap, used)


# The tensors among a model's outputs tell fully_shard when the backward pass begins. Some versions
# of torch look for them in nothing but trees, and without them reduce no gradient.
if hasattr(_pytree, "register_pytree_node"):
    _pytree.register_pytree_node(HiddenStates, _flat, _made)


class KeepsHiddenStates(LayerMixin):
    """An output layer that hands on its input while it trains; without gradients it has logits.

    Attributes:
        softcap: c of a cap that the logits get here, as in a model that has none of its own.
    """

    order = 0

    def forward(self, input: Tensor, **options: Any) -> Any:
        """Hidden states in training, logits (or log-probabilities of a mixture) otherwise.

        ``options`` are those of a layer with adapters, such as the ``adapter_names`` of each row.
        """
        cap: Optional[float] = getattr(self, "softcap", None)
        if self.training and torch.is_grad_enabled():
            if options:
                raise UnsupportedError(
                    "an output layer that is called with hidden states alone, for a loss by blocks",
                    listed([*options]),
                    "Train the model without fused_loss_, or without these.",
                )
            # torch 1.12 has the second kind alone.
            if getattr(self, "_backward_pre_hooks", None) or self._backward_hooks:
                raise UnsupportedError(
                    "an output layer without backward hooks, for a loss by blocks",
                    "one, which is called with the gradient of logits that are not made",
                    "Remove the hook, or train the model without fused_loss_.",
                )
            handed = _handed_on(input, self)
            return handed if cap is None else (handed / cap).tanh() * cap
        logits = super().forward(input, **options)
        return logits if cap is None else softcapped(logits, cap)

    def beyond_plain(self) -> str:
        """The cap, or what the mixins behind this one say."""
        cap = getattr(self, "softcap", None)
        return super().beyond_plain() if cap is None else f"logits with the cap {cap:g}"

    def recorded(self) -> Dict[str, Any]:
        """The cap, which is a part of the model."""
        cap = getattr(self, "softcap", None)
        return {**super().recorded(), **({} if cap is None else {"softcap": cap})}


class AdaptedKeepsHiddenStates(KeepsHiddenStates):
    """An output layer with adapters of peft; once these are gone, its base layer does the same."""

    def unload_and_optionally_merge_module(self, merge: bool, **options: Any) -> nn.Module:
        """Return the base layer with the cap of this one, when peft merges adapters or drops them.

        peft calls this method of the layers that have it, and does itself what stands under
        ``else`` for all others.
        """
        layer: Any = super()
        if hasattr(layer, "unload_and_optionally_merge_module"):
            base = layer.unload_and_optionally_merge_module(merge=merge, **options)
        else:
            if merge:
                layer.merge(**options)
            base = layer.get_base_layer()
        put_on(base, KeepsHiddenStates)
        if hasattr(self, "softcap"):
            base.softcap = self.softcap
        return base  # type: ignore[no-any-return]


@outside_graphs
def _handed_on(features: Tensor, layer: nn.Module) -> Any:
    dtype = type_of_products(features.detach(), features.dtype)
    return HiddenStates(features, layer, dtype, used=Entries.of(layer))
