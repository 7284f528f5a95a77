"""A CUDA device that exists in the books only: real values on the CPU, CUDA's rules about devices.

Tensors are ordinary CPU tensors; which of them are "on the GPU" is written on their storages. What
Python code asks (``.device``, ``.cuda()``, ``.cpu()``, ``.to()``) is answered by the books. A
dispatch mode sees every operator, the backward pass included, refuses to mix devices where CUDA
would, and records what makes the host wait for the device: ``item``, ``nonzero``, boolean masks,
copies between the devices, ``eigh``.

``FakeTensorMode`` cannot replace it: this runs code whose shapes depend on the data, needs no CUDA
build for the backward pass, and gives numbers. What it cannot show are times, the rounding of a
GPU's kernels, and races between streams.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
from typing import Any, Dict, Iterator, List, NamedTuple, Optional
from unittest import mock

import torch
import torch._dynamo  # before anything is patched: it keeps a table of torch.cuda
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from spectral_fairseq.provenance import torch_release

if torch_release() < (2, 2):  # whose modes do not see all that Python code asks of a tensor
    raise ImportError("the virtual device needs torch 2.2")

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def _leaves(tree: Any) -> List[Any]:
    return pytree.tree_flatten(tree)[0]


def mark(tensor: torch.Tensor, place: Optional[str]) -> None:
    if tensor.layout == torch.strided:
        tensor.untyped_storage().place = place


def place(tensor: torch.Tensor) -> Optional[str]:
    """``cuda``, ``cpu``, or None for what C++ made and nobody has claimed yet."""
    if tensor.layout != torch.strided:
        return "cpu"
    return getattr(tensor.untyped_storage(), "place", "cpu")


def on_gpu(tensor: torch.Tensor) -> bool:
    return place(tensor) == "cuda"


def kind_of(device: Any) -> str:
    """``cuda`` or ``cpu`` of whatever torch takes for a device; a number needs an accelerator."""
    return "cuda" if isinstance(device, int) else str(device).split(":")[0]


class DeviceMixed(RuntimeError):
    """An operator got tensors of both devices, which CUDA refuses."""


SYNCS = {
    "_local_scalar_dense": "item",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "equal": "equal",
    "_unique2": "unique",
    "unique_consecutive": "unique",
    "unique_dim": "unique",
    "is_nonzero": "bool",
    "bincount": "bincount",
    "_linalg_eigh": "eigh",
    "linalg_eigh": "eigh",
    "_linalg_svd": "svd",
    "_linalg_check_errors": "linalg errors",
    "linalg_qr": "qr",
    "_linalg_slogdet": "slogdet",
    "masked_scatter": "masked_scatter",
}
# Operators that take numbers of the CPU, beside those that torch calls pointwise.
POINTWISE = frozenset(
    (
        "where fill_ masked_fill masked_fill_ lerp lerp_ foreach clamp clamp_ _foreach_mul_ "
        "_foreach_mul"
    ).split()
)
INDEXING = frozenset(("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"))


class Event(NamedTuple):
    """What an operator made the host wait for."""

    what: str
    where: str
    count: int


class Log:
    """The events of a block; ``muted`` inside of what counts as a single operator on CUDA."""

    def __init__(self) -> None:
        self.events: List[Event] = []
        self.muted = 0

    def add(self, what: str, count: int = 1) -> None:
        if not self.muted:
            self.events.append(Event(what, location(), count))

    def waits(self) -> Dict[str, int]:
        """Those that this package or autograd caused, as ``place: what`` to their number."""
        found: Dict[str, int] = collections.Counter()
        for event in self.events:
            if not event.where.startswith("<"):
                found[f"{event.where}: {event.what}"] += event.count
        return found


def location() -> str:
    """The innermost frame of this package, or of fairseq in angle brackets."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/spectral_fairseq/" in name:
            return f"{name.split('/spectral_fairseq/')[-1]}:{frame.f_lineno}"
        if "/site-packages/fairseq" in name:
            return f"<{name.split('/site-packages/')[-1]}:{frame.f_lineno}>"
        frame = frame.f_back
    return "autograd or test"


def _wide_mm(left, right, out_dtype):
    return torch.mm(left.to(out_dtype), right.to(out_dtype))


def _wide_addmm_out(total, left, right, out_dtype, *, alpha=1, out):
    return out.copy_(torch.addmm(total, left.to(out_dtype), right.to(out_dtype), alpha=alpha))


# Products of half precision with float32 results, which CPU builds of torch do not have.
WIDE_PRODUCTS: Dict[Any, Any] = {}
if hasattr(torch.ops.aten.mm, "dtype"):
    WIDE_PRODUCTS[torch.ops.aten.mm.dtype] = _wide_mm
    WIDE_PRODUCTS[torch.ops.aten.addmm.dtype_out] = _wide_addmm_out


class _Dispatch(TorchDispatchMode):
    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log
        self.direct = 0  # inside a factory that Python asked for

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.split("::")[1]
        tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        places = {place(t) for t in tensors}
        asked = kwargs.get("device")
        if asked is not None:
            kwargs["device"] = CPU
            asked = kind_of(asked)
        here = self._place(func, name, tensors, places, asked, args)
        before = {t.untyped_storage()._cdata for t in tensors if t.layout == torch.strided}
        out = WIDE_PRODUCTS.get(func, func)(*args, **kwargs)
        for t in _leaves(out):
            if isinstance(t, torch.Tensor) and t.layout == torch.strided:
                storage = t.untyped_storage()
                if storage._cdata not in before or not hasattr(storage, "place"):
                    mark(t, here)
        if name == "_pack_padded_sequence":
            mark(out[1], "cpu")
        if here == "cuda" or "cuda" in places:
            self._count(func, name, args, kwargs)
        return out

    def _place(self, func, name, tensors, places, asked, args) -> Optional[str]:
        if name in ("_to_copy", "copy_"):
            if name == "copy_":
                source, target = place(args[1]), place(args[0])
            else:
                source = place(args[0])
                # Python's .cpu() and .to("cpu") never come here; C++ passes the books' CPU on.
                target = "cuda" if asked == "cuda" else source
            self._copied(source, target)
            return target
        if not tensors:
            if asked == "cuda":
                return "cuda"
            return "cpu" if self.direct else None
        if asked is not None and name.startswith(
            ("new_", "empty", "zeros", "ones", "full", "rand", "arange")
        ):
            # new_zeros(device=...), zeros_like(device=...): C++ passes the CPU of the books on.
            return "cuda" if asked == "cuda" else ("cuda" if "cuda" in places else asked)
        if "cuda" in places and "cpu" in places:
            strays = [t for t in tensors if place(t) == "cpu"]
            if name in INDEXING:
                value = args[2] if len(args) > 2 else None
                for t in strays:
                    if t is value and t.dim() == 0:
                        if not self._is_masked_fill(args):
                            self.log.add(f"{name}: scalar H2D")
                    elif t is args[0] or t is value:
                        raise DeviceMixed(
                            f"{func}: {[(place(x), tuple(x.shape)) for x in tensors]}"
                        )
                    else:
                        self.log.add(f"{name}: CPU index H2D")
                return place(args[0])
            if name == "_pack_padded_sequence":  # CUDA too wants the lengths on the CPU
                return "cuda"
            wrong = [t for t in strays if t.dim() > 0]
            pointwise = torch.Tag.pointwise in func.tags or name in POINTWISE
            if wrong or not pointwise:
                raise DeviceMixed(
                    f"{func}: {[(place(x), tuple(x.shape)) for x in tensors]} at {location()}"
                )
            return "cuda"
        if "cuda" in places:
            return "cuda"
        return "cpu" if "cpu" in places else None

    def _copied(self, source: Optional[str], target: Optional[str]) -> None:
        if {source, target} == {"cpu", "cuda"}:
            self.log.add("to H2D" if target == "cuda" else "to D2H")

    @staticmethod
    def _is_masked_fill(args) -> bool:
        indices = [i for i in args[1] if i is not None]
        masks = [i for i in indices if i.dtype in (torch.bool, torch.uint8)]
        return len(indices) == len(masks) == 1 == args[2].numel()

    def _count(self, func, name, args, kwargs) -> None:
        log = self.log
        if name in SYNCS:
            log.add(SYNCS[name])
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            if masks and not (name != "index" and self._is_masked_fill(args)):
                log.add(f"{name}: boolean mask", len(masks))
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            log.add("repeat_interleave")


class _Python:
    """What Python code asks tensors and torch for, answered by the books."""

    # Composed on a CPU, a kernel or a few on CUDA, which wait for nothing.
    FUSED = (
        (torch.nn.functional, "dropout"),
        (torch, "dropout"),
        (torch._VF, "lstm"),
        (torch.nn.functional, "scaled_dot_product_attention"),
    )
    FACTORIES = (
        "zeros ones empty full arange rand randn randint eye linspace from_numpy randperm "
        "scalar_tensor empty_strided zeros_like ones_like"
    ).split()

    def __init__(self, log: Log, dispatch: _Dispatch) -> None:
        self.log, self.dispatch = log, dispatch

    def patches(self) -> Any:
        T = torch.Tensor
        moved, log = self._moved, self.log

        def cuda(tensor, device=None, non_blocking=False, memory_format=None):
            return moved(tensor, "cuda")

        def cpu(tensor, memory_format=None):
            return moved(tensor, "cpu")

        def type_as(tensor, other):
            return moved(tensor, place(other) or "cpu").to(other.dtype)

        def numpy(tensor, *args, _numpy=T.numpy, **kwargs):
            if on_gpu(tensor):
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            return _numpy(tensor, *args, **kwargs)

        def tolist(tensor, _tolist=T.tolist):
            if on_gpu(tensor):
                log.add("tolist")
            return _tolist(tensor)

        def new_tensor(tensor, data, _new_tensor=T.new_tensor, **kwargs):
            out = _new_tensor(tensor, data, **kwargs)
            mark(out, "cpu")
            return moved(out, place(tensor))

        def deepcopy(tensor, memo, _deepcopy=T.__deepcopy__):
            out = _deepcopy(tensor, memo)
            mark(out, place(tensor))
            return out

        yield T, "device", property(lambda tensor: CUDA if on_gpu(tensor) else CPU)
        yield T, "is_cuda", property(on_gpu)
        yield T, "cuda", cuda
        yield T, "cpu", cpu
        yield T, "to", _to_method(self, T.to)
        yield T, "type_as", type_as
        yield T, "numpy", numpy
        yield T, "tolist", tolist
        yield T, "new_tensor", new_tensor
        yield T, "__deepcopy__", deepcopy
        for module, name in self.FUSED:
            yield module, name, self._fused(getattr(module, name))
        for name in self.FACTORIES:
            yield torch, name, self._factory(getattr(torch, name))
        for name in ("tensor", "as_tensor"):
            yield torch, name, self._from_data(getattr(torch, name))

    def _fused(self, function: Any) -> Any:
        @functools.wraps(function)
        def run(*args, **kwargs):
            self.log.muted += 1
            try:
                # oneDNN has no LSTM in float16, CUDA has.
                with torch.backends.mkldnn.flags(enabled=False):
                    return function(*args, **kwargs)
            finally:
                self.log.muted -= 1

        return run

    def _factory(self, function: Any) -> Any:
        @functools.wraps(function)
        def run(*args, **kwargs):
            self.dispatch.direct += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.dispatch.direct -= 1

        return run

    def _from_data(self, function: Any) -> Any:
        @functools.wraps(function)
        def run(data, *args, **kwargs):
            device = kwargs.pop("device", None)
            out = function(data, *args, **kwargs)
            if isinstance(data, torch.Tensor):
                mark(out, place(data)) if out is not data else None
            else:
                mark(out, "cpu")
                leaves = _leaves(data)
                if any(isinstance(x, torch.Tensor) and on_gpu(x) for x in leaves):
                    self.log.add("torch.tensor of CUDA scalars", len(leaves))
            if device is not None and kind_of(device) != place(out):
                trained = out.requires_grad
                out = self._moved(out.detach(), kind_of(device)).requires_grad_(trained)
            return out

        return run

    def _moved(self, tensor: Any, target: str) -> Any:
        if place(tensor) == target:
            return tensor
        self.log.add("to H2D" if target == "cuda" else "to D2H")
        self.log.muted += 1
        try:
            out = tensor.clone()
        finally:
            self.log.muted -= 1
        mark(out, target)
        return out


def _to_method(python: _Python, original: Any) -> Any:
    def to(tensor, *given, copy=False, **named):
        like = [one for one in (*given, *named.values()) if isinstance(one, torch.Tensor)]
        if like:
            given, named = (CUDA if on_gpu(like[0]) else CPU, like[0].dtype), {}
        if given and type(given[0]) is int:  # the number of a device
            given = (CUDA, *given[1:])
        if type(named.get("device")) is int:
            named["device"] = CUDA
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*given, **named)
        layout = {} if layout is None else {"memory_format": layout}
        target = place(tensor) if device is None else kind_of(device)
        if target not in ("cuda", "cpu", None):
            return original(tensor, device, dtype, non_blocking, copy, **layout)
        if target is not None and place(tensor) not in (target, None):
            tensor, copy = python._moved(tensor, target), False
        if dtype is None and not copy and not layout:
            return tensor
        return original(tensor, dtype or tensor.dtype, copy=copy, **layout)

    return to


class _Autocast(torch.autocast):
    """``torch.autocast("cuda")`` of tensors that lie on the CPU in truth."""

    def __init__(self, device_type: str = "cuda", dtype: Any = None, **options: Any) -> None:
        default = torch.float16 if device_type == "cuda" else torch.bfloat16
        super().__init__("cpu", dtype=dtype or default, **options)


def _nothing(*_: Any, **__: Any) -> None:
    return None


@contextlib.contextmanager
def virtual_cuda(free_bytes: int = 64 * 2**30) -> Iterator[Log]:
    """Inside the block there is one CUDA device, with ``free_bytes`` of free memory."""
    log = Log()
    dispatch = _Dispatch(log)
    patches = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_lazy_init": _nothing,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda *a: (9, 0),
        "memory_allocated": lambda *a: 0,
        "memory_reserved": lambda *a: 0,
        "mem_get_info": lambda *a: (free_bytes, 80 * 2**30),
        "manual_seed_all": _nothing,
        "is_bf16_supported": lambda *a: True,
    }
    with contextlib.ExitStack() as stack:

        def patch(place, name, value):
            stack.enter_context(mock.patch.object(place, name, value))

        for name, value in patches.items():
            patch(torch.cuda, name, value)
        patch(torch.cuda, "synchronize", lambda *a: log.add("torch.cuda.synchronize"))
        # What lies behind the books is a CPU: no layer may ask cuDNN about its weights.
        patch(torch.backends.cudnn, "is_acceptable", lambda tensor: False)
        # Optimisers of builds for CUDA ask the driver whether a graph is being captured.
        for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
            if hasattr(torch.optim.Optimizer, name):
                patch(torch.optim.Optimizer, name, _nothing)
        patch(torch, "autocast", _Autocast)
        patch(torch.cuda.amp, "autocast", functools.partial(_Autocast, "cuda"))
        stack.enter_context(dispatch)
        for module, name, value in list(_Python(log, dispatch).patches()):
            patch(module, name, value)
        yield log
