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

from typing import Any, Callable, Dict, Tuple, Type

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
        return _empty, self.parts, self.__dict__


_classes: Dict[Any, Type[nn.Module]] = {}


def _changed_class(base: Type[nn.Module], mixins: Tuple[Type[LayerMixin], ...]) -> Type[nn.Module]:
    if (base, mixins) in _classes:
        return _classes[base, mixins]
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    fixed = tuple(name for mixin in mixins for name in mixin.fixed)
    names.update(fixed=fixed, parts=(base, mixins))
    return _classes.setdefault((base, mixins), type(base.__name__, (*mixins, base), names))


def _empty(base: Type[nn.Module], mixins: Tuple[Type[LayerMixin], ...]) -> nn.Module:
    kind = _changed_class(base, mixins)
    made: nn.Module = kind.__new__(kind)
    return made


def _parts(layer: nn.Module) -> Tuple[Type[nn.Module], Tuple[Type[LayerMixin], ...]]:
    return layer.parts if isinstance(layer, LayerMixin) else (type(layer), ())


def forward_of(layer: nn.Module) -> Any:
    """The forward pass of a layer's class, without mixins."""
    return _parts(layer)[0].forward


def beyond_plain(layer: Any) -> str:
    """What a layer, with mixins or without, computes that no plain layer does; mostly nothing."""
    return layer.beyond_plain() if isinstance(layer, LayerMixin) else ""


def put_on(layer: nn.Module, mixin: Type[LayerMixin]) -> None:
    """Put a mixin before the class of a layer."""
    base, mixins = _parts(layer)
    layer.__class__ = _changed_class(base, tuple(sorted((*mixins, mixin), key=lambda m: m.order)))


def take_off(layer: nn.Module, mixin: Type[LayerMixin]) -> None:
    """Take a mixin away again, or one that is derived from it."""
    base, mixins = _parts(layer)
    mixins = tuple(other for other in mixins if not issubclass(other, mixin))
    layer.__class__ = _changed_class(base, mixins) if mixins else base
