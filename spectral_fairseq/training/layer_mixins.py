"""Methods on layers that exist: a layer keeps its place and gets another class.

Note [LayerMixin classes]
------------------------
A layer keeps its place, its name and its other attributes; only its class becomes a subclass of the
one that it had, with a mixin of this package before it. ``isinstance``, ``get_input_embeddings``,
ties and the keys of the other entries stay as they are, and giving the old class back takes the
method off without a trace. torch's own parametrizations work like this, but refuse to be pickled
and know one layer each, while a tied table has several.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NoReturn, Tuple, Type

from torch import Tensor, nn

from spectral_fairseq.errors import UnsupportedError

OFF_FIRST = "Take the method of spectral_fairseq.training off first, with plain_(model)."


class LayerMixin(nn.Module):
    """Base class of the mixins; see Note [LayerMixin classes].

    Class attributes:
        fixed: names of attributes that cannot be set while the mixin is there.
        order: place among the mixins of a layer, the smallest first.
        computes_weight: whether ``weight`` is computed at each use.
    """

    fixed: Tuple[str, ...] = ()
    order = 0
    computes_weight = False
    # Of a layer's class: the one that it had, and the mixins before it.
    parts: Tuple[Type[nn.Module], Tuple[Type[LayerMixin], ...]]

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what would have no effect, or would break a tie in silence."""
        if name in self.fixed:
            raise UnsupportedError(
                f"`{name}` of {type(self).__name__} to stay as it is under a method",
                "another value for it, as tie_weights and resize_token_embeddings set one",
                OFF_FIRST,
            )
        super().__setattr__(name, value)

    def recorded(self) -> Dict[str, Any]:
        """What the settings of a saved model say of it, as JSON; nothing of what only trains."""
        return {}

    def beyond_plain(self) -> str:
        """What the layer computes that no plain layer does, for messages; empty for nothing."""
        return ""

    def plain_entries(self, dense: Callable[[Any], Tensor]) -> Dict[str, Tensor]:  # noqa: ARG002
        """The entries of a state dict by which a plain layer computes the same.

        Args:
            dense: the matrix of a table, the same tensor whenever it is asked for.
        """
        return {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The class is made at run time, so pickle and deepcopy are told how."""
        if "parts" not in vars(type(self)):  # a class derived from it, by another package
            return super().__reduce_ex__(protocol)
        return _empty, self.parts, self.__dict__


_classes: Dict[Any, Type[nn.Module]] = {}
# Attributes that Python gives every class anew.
_OF_EACH_CLASS = ("__dict__", "__weakref__")
_Mixins = Tuple[Type[LayerMixin], ...]


def _changed_class(base: Type[nn.Module], mixins: _Mixins) -> Type[nn.Module]:
    if not mixins:
        return base
    if (base, mixins) in _classes:
        return _classes[base, mixins]
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    fixed = tuple(name for mixin in mixins for name in mixin.fixed)
    names.update(fixed=fixed, parts=(base, mixins))
    return _classes.setdefault((base, mixins), type(base.__name__, (*mixins, base), names))


def _empty(base: Type[nn.Module], mixins: _Mixins) -> nn.Module:
    kind = _changed_class(base, mixins)
    made: nn.Module = kind.__new__(kind)
    return made


def _with_mixins(kind: Any, change: Callable[[_Mixins], _Mixins]) -> Any:
    """A class of layers with other mixins.

    parametrize and fully_shard of torch derive a class from that of a layer. A class that they have
    derived from one with mixins is made anew, derived from that with the other mixins.
    """
    if not issubclass(kind, LayerMixin):
        return _changed_class(kind, change(()))
    if "parts" in vars(kind):
        base, mixins = kind.parts
        return _changed_class(base, change(mixins))
    bases = tuple(
        _with_mixins(base, change) if issubclass(base, LayerMixin) else base
        for base in kind.__bases__
    )
    own = {name: one for name, one in vars(kind).items() if name not in _OF_EACH_CLASS}
    return type(kind)(kind.__name__, bases, own)


def _without(mixin: Type[LayerMixin]) -> Callable[[_Mixins], _Mixins]:
    return lambda mixins: tuple(one for one in mixins if not issubclass(one, mixin))


def refuse_replicas(*_: Any) -> NoReturn:
    """In the place of ``nn.Module._replicate_for_data_parallel``, which copies ``__dict__``.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "one process for each GPU",
        "DataParallel, whose copies of this model would compute with the first GPU's parameters",
        "Start the training with torchrun or accelerate launch, or let it see one GPU.",
    )


def forward_of(layer: nn.Module) -> Any:
    """The forward pass of a layer's class, without mixins."""
    return _with_mixins(type(layer), _without(LayerMixin)).forward


def beyond_plain(layer: Any) -> str:
    """What a layer, with mixins or without, computes that no plain layer does; mostly nothing."""
    return layer.beyond_plain() if isinstance(layer, LayerMixin) else ""


def put_on(layer: nn.Module, mixin: Type[LayerMixin]) -> None:
    """Put a mixin before the class of a layer."""

    def change(mixins: _Mixins) -> _Mixins:
        return tuple(sorted((*mixins, mixin), key=lambda one: one.order))

    _change_class(layer, _with_mixins(type(layer), change))


def take_off(layer: nn.Module, mixin: Type[LayerMixin]) -> None:
    """Take a mixin away again, or one that is derived from it."""
    _change_class(layer, _with_mixins(type(layer), _without(mixin)))


def _change_class(layer: nn.Module, kind: Type[nn.Module]) -> None:
    """Give a layer another class, whose forward pass is called by all that called the old one's.

    The hooks of accelerate, which ``device_map`` puts around the layers of a quantised model or of
    one that is spread over devices, keep the bound method and call that.
    """
    kept = _kept_forwards(layer)
    layer.__class__ = kind
    for name in kept:
        layer.__dict__[name] = kind.forward.__get__(layer)


def _kept_forwards(layer: nn.Module) -> List[str]:
    """The attributes that are the forward pass of the layer's class, bound to the layer."""
    own = type(layer).forward
    return [
        name
        for name, kept in layer.__dict__.items()
        if getattr(kept, "__self__", None) is layer and getattr(kept, "__func__", None) is own
    ]


def is_passed_over(layer: nn.Module) -> bool:
    """Whether the attribute ``forward`` of a layer may not call the forward pass of its class."""
    return "forward" in layer.__dict__ and not _kept_forwards(layer)
