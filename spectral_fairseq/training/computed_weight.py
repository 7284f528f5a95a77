"""The weight of a layer that computes it, which refuses to be written to.

Tools of others write to a layer's weight in place: peft merges an adapter into it, a loop copies
rows into it. Where the matrix is computed from the entries of a table at each use, such a write
would change a tensor that is thrown away, without a word.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from spectral_fairseq.errors import UnsupportedError

# torch 1.12 has the first name alone; later ones leave another meaning to it.
_plainly: Any = getattr(
    torch._C, "DisableTorchFunctionSubclass", getattr(torch._C, "DisableTorchFunction", None)
)


class ComputedWeight(Tensor):
    """W of a table, shape (N, d): read as any tensor is, and refused where it would be written to.

    What shares its memory (``data``, ``detach()``, rows and other views) is refused likewise; every
    other result is a tensor as usual.
    """

    def __deepcopy__(self, memo: Any) -> Any:
        """A tensor as usual."""
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """In a file it is a tensor as usual."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry out what only reads.

        Raises:
            UnsupportedError: it writes.
        """
        kwargs = kwargs or {}
        if _is_written(func, args, kwargs):
            raise UnsupportedError(
                "the weight of a layer with a table to be read alone, since the table's entries "
                "are what is trained",
                f"`{_name(func)}` on it, which would have no effect",
                "Call plain_(model) before it, such as before an adapter is merged or rows are "
                "set, and put the table on again afterwards; to freeze the table, call "
                "requires_grad_(False) of the layer.",
            )
        with _plainly():
            result = func(*args, **kwargs)
        return result if func is Tensor.as_subclass else _guarded(result, args)


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("__set__", "__get__"):  # of a property, such as data
        owner = getattr(func, "__self__", None)
        return getattr(owner, "__name__", name)
    return name


def _is_written(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function of torch changes a computed weight among its arguments."""
    first = args[0] if args else kwargs.get("input", kwargs.get("tensor"))
    name = getattr(func, "__name__", "")
    if _holds(kwargs.get("out")):
        return True
    if not _holds(first):
        return False
    if name == "requires_grad_":
        return not (args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
    in_place = name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}")
    named_so = name.endswith("_") and not name.endswith("__")
    setters = ("__set__", "__setitem__")
    return bool(in_place or named_so or name in setters or kwargs.get("inplace"))


def _holds(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds, value))
    # A parameter that was made of it is another layer's own.
    return isinstance(value, ComputedWeight) and not isinstance(value, nn.Parameter)


def _guarded(result: Any, args: Any) -> Any:
    """The result, which is a computed weight too where it shares the memory of one."""
    if isinstance(result, (list, tuple)) and any(type(one) is Tensor for one in result):
        guarded = [_guarded(one, args) for one in result]
        return guarded if type(result) is list else tuple(guarded)
    if type(result) is not Tensor or result.is_meta or result.nelement() == 0:
        return result
    with _plainly():
        shares = any(
            isinstance(one, ComputedWeight) and _memory(one) == _memory(result) for one in args
        )
        return result.as_subclass(ComputedWeight) if shares else result


def _memory(tensor: Tensor) -> Any:
    """Where the memory of a tensor begins; none for those that have no memory of their own."""
    try:
        storage = getattr(tensor, "untyped_storage", tensor.storage)
        return storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # fake tensors of compilers
        return object()


def read_alone(weight: Tensor) -> Tensor:
    """The same matrix, which refuses to be written to; a compiler gets it as it is."""
    is_compiling: Any = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    if is_compiling is not None and is_compiling():
        return weight
    return weight.as_subclass(ComputedWeight)
