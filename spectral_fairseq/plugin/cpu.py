"""What makes a CPU faster: the products, kept memory, Adam in one pass, ``--fast-dropout``."""

from __future__ import annotations

import ctypes
import logging
import math
import os
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import torch
from fairseq.modules import FairseqDropout
from torch import Tensor, nn
from torch.optim.adamw import adamw

from spectral_fairseq.compat.machines import evaluates
from spectral_fairseq.compat.patching import Patch, replaces, wrapping
from spectral_fairseq.functional.fast_dropout import fast_dropout
from spectral_fairseq.functional.float32_products import Products, choose_products, set_products
from spectral_fairseq.functional.processor import processor
from spectral_fairseq.options import FLOAT32_PRODUCTS, Option
from spectral_fairseq.plugin.listener import Listener

logger = logging.getLogger(__name__)


# ``--float32-products``: how fairseq's commands multiply float32 matrices on a CPU.
#
#     --float32-products {auto,fast,torch}    default: auto
#
# fairseq's ``call_main`` runs every command, so the products are chosen around it, and are put
# back as they were found when it ends: two trainings in one process do not disturb each other. A
# training keeps the choice in its checkpoints, and one that is resumed on the same kind of
# processor takes it from there. ``fairseq-hydra-train`` loads the plugin within ``call_main``, and
# has no such flag: its trainer chooses as ``auto`` does.


@dataclass
class CommandOptions:
    """The flag of all of fairseq's commands that use a model."""

    float32_products: str = FLOAT32_PRODUCTS.field


class _Choice:
    """What holds in this process.

    Attributes:
        asked: the value of the flag.
        products: what it means here; ``None`` outside of a command.
    """

    def __init__(self) -> None:
        self.asked = str(FLOAT32_PRODUCTS.default)
        self.products: Optional[Products] = None
        self._restore: Callable[[], None] = lambda: None

    def apply(self, products: Products, common: Any) -> None:
        """Multiply as ``products`` says, and say so; on a CPU, keep freed memory too."""
        self.end()
        halves = any(getattr(common, name, False) for name in _HALVES)
        self.products, self._restore = products, set_products(products, halves)
        logger.info("float32 products are computed %s", products)
        if _on_cpu(common):
            keep_freed_memory()

    def end(self) -> None:
        """Put everything back as it was found."""
        self._restore()
        self.products, self._restore = None, lambda: None


CHOICE = _Choice()
_HALVES = ("fp16", "bf16", "memory_efficient_fp16", "memory_efficient_bf16")


def _on_cpu(common: Any) -> bool:
    return bool(getattr(common, "cpu", False)) or not torch.cuda.is_available()


def warn_of_slow_bfloat16(common: Any) -> None:
    """Say that a processor without products of bfloat16 numbers is slower with them."""
    bfloat16 = getattr(common, "bf16", False) or getattr(common, "memory_efficient_bf16", False)
    if bfloat16 and not processor().has_bfloat16:
        logger.warning(
            "expected a processor that multiplies bfloat16 numbers, for --bf16 on a CPU; found "
            "%s, which does not: it is several times slower than in float32, which is what it "
            "computes in without the flag.",
            processor().name,
        )


@wrapping
def _adding_flag(parser: Any, *args: Any, original: Callable[..., Any], **kwargs: Any) -> Any:
    """Add the flag beside those that all commands with a model share."""
    group = original(parser, *args, **kwargs)
    flag = FLOAT32_PRODUCTS
    parser.add_argument(flag.flag, default=flag.default, choices=flag.choices, help=flag.help)
    return group


@wrapping
def _remembering(*args: Any, original: Callable[..., Any], **kwargs: Any) -> Any:
    """Keep the value of the flag, which no part of fairseq's configuration holds."""
    parsed = original(*args, **kwargs)
    args_of = parsed[0] if isinstance(parsed, tuple) else parsed
    # fairseq-validate parses once more without defaults: no attribute then.
    CHOICE.asked = getattr(args_of, FLOAT32_PRODUCTS.name, CHOICE.asked)
    return parsed


@wrapping
def _choosing(cfg: Any, *args: Any, original: Callable[..., Any], **kwargs: Any) -> Any:
    try:
        if _on_cpu(cfg.common) or CHOICE.asked == "fast":
            CHOICE.apply(choose_products(CHOICE.asked), cfg.common)
        if _on_cpu(cfg.common) and evaluates(cfg):
            warn_of_slow_bfloat16(cfg.common)
        return original(cfg, *args, **kwargs)
    finally:
        CHOICE.end()
        CHOICE.asked = str(FLOAT32_PRODUCTS.default)


CHOSEN_PRODUCTS = Patch(
    name="float32 products",
    reason="A CPU multiplies float32 matrices through oneDNN where that is faster and equally "
    "precise (--float32-products).",
    install=replaces(
        {
            "fairseq.options:add_dataset_args": _adding_flag,
            "fairseq.options:parse_args_and_arch": _remembering,
            "fairseq.distributed.utils:call_main": _choosing,
        }
    ),
)


class ChosenProducts(Listener):
    """Keeps the choice in checkpoints, and warns of a precision that this processor lacks."""

    name = "float32_products"

    @property
    def is_active(self) -> bool:
        """On a CPU only."""
        return _on_cpu(self.trainer.cfg.common)

    def begin_training(self) -> None:
        """Choose where no command has, and warn of slow bfloat16."""
        common = self.trainer.cfg.common
        if CHOICE.products is None:
            CHOICE.apply(choose_products(CHOICE.asked), common)
        warn_of_slow_bfloat16(common)

    def save(self) -> Any:
        """The choice and the processor that it was made on."""
        if CHOICE.products is None:
            return None
        return {"fast": CHOICE.products.fast, "processor": processor().name}

    def load(self, saved: Any) -> None:
        """Go on as the checkpoint has it, unless the flag or the processor says otherwise."""
        if CHOICE.asked != "auto" or not saved or saved["processor"] != processor().name:
            return
        if CHOICE.products is None or CHOICE.products.fast != saved["fast"]:
            products = Products(saved["fast"], "as in the checkpoint that training goes on from")
            CHOICE.apply(products, self.trainer.cfg.common)


# Freed memory is kept for the next tensors, in huge pages.
#
# glibc hands the memory of large tensors back to the system as soon as they are freed, and the
# system clears new pages for the next ones: in bfloat16 at the small size of docs/speed.md a tenth
# of an update. A processor remembers where some thousand pages lie, which are a few MiB in pages of
# 4 KiB, and looks the others up: at IWSLT's size another tenth on some machines. Many systems give
# huge pages only to programs that ask for them (``madvise``), for addresses that they already have:
# the heap takes half of the memory's size in addresses at once, and memory only where it is used.
# glibc's own variables come first, and other allocators have no such settings.

KEPT_BYTES = 2**30  # A tensor that is larger is handed back.
_OLDER_LIMIT = 2**25  # what older versions of glibc take as M_MMAP_THRESHOLD at most
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _NEVER = -1, -3, -1
ALLOCATOR_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let glibc keep the memory of freed tensors in this process, and return whether it will."""
    if any(name in os.environ for name in ALLOCATOR_VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None:  # macOS, musl
        return False
    for kept in (KEPT_BYTES, _OLDER_LIMIT):
        if mallopt(_M_MMAP_THRESHOLD, kept):
            mallopt(_M_TRIM_THRESHOLD, _NEVER)
            use_huge_pages(kept // 2)
            return True
    return False


_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_OVERCOMMIT, _STRICT = Path("/proc/sys/vm/overcommit_memory"), "2"
_MADV_HUGEPAGE = 14
_MOST_ADDRESSES = 2**36


@cache  # Growing a heap that lies in huge pages would use one of them for each block.
def use_huge_pages(block: int) -> int:
    """Let glibc's heap grow in huge pages, where Linux gives them to programs that ask only.

    This is done once in a process, in which several commands may run.

    Args:
        block: a size in bytes for which glibc takes memory of its heap.

    Returns:
        The bytes of the heap that will lie in huge pages as they are used; 0 where addresses are
        limited or count as memory.
    """
    try:
        asked = "[madvise]" in _HUGE_PAGES.read_text()
        if not asked or _OVERCOMMIT.read_text().strip() == _STRICT:
            return 0
    except OSError:  # another system, or a kernel without them
        return 0
    import resource  # which Windows does not have

    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    if any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits):
        return 0
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    libc.free.argtypes = (ctypes.c_void_p,)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    # The heap grows by all blocks, and keeps the addresses when they are freed.
    blocks = [libc.malloc(block) for _ in range(min(memory // 2, _MOST_ADDRESSES) // block)]
    for address in reversed(blocks):
        libc.free(address)
    advised = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            start, end = (int(address, 16) for address in line.split(None, 1)[0].split("-"))
            if libc.madvise(start, end - start, _MADV_HUGEPAGE) == 0:
                advised += end - start
    return advised


# fairseq's Adam in one pass over the memory of each parameter.
#
# fairseq computes a step in nine operations on whole tensors; torch's fused AdamW, which came to
# CPUs with torch 2.4, takes .3 to .4 of the time. It adds eps to the root of the second moment
# after the bias of the root is corrected, and fairseq before: eps is divided by that correction.


def _fused_adam(parameters: List[Tensor], states: List[Any], step: int, **group: Any) -> None:
    """Make the step of fairseq's Adam with this number, in place.

    Args:
        parameters: with gradients of their type, on a CPU.
        states: of each, with ``exp_avg`` and ``exp_avg_sq``, which are changed too.
        step: from 1.
        group: ``lr``, ``betas``, ``eps`` and ``weight_decay``; others are ignored.
    """
    beta1, beta2 = group["betas"]
    if group["weight_decay"]:
        for parameter in parameters:
            parameter.data.add_(parameter.data, alpha=-group["weight_decay"] * group["lr"])
    adamw(
        [parameter.data for parameter in parameters],
        [parameter.grad.data for parameter in parameters],  # type: ignore[union-attr]
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [torch.tensor(step - 1.0) for _ in states],  # is counted up within
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=0.0,  # as fairseq has it, above: 1 - lr * weight_decay may round to 1
        eps=group["eps"] / math.sqrt(1 - beta2**step),
        maximize=False,
    )


@cache
def _has_fused_adam() -> bool:
    """Whether this torch steps parameters on a CPU in one pass."""
    parameter = torch.zeros(1)
    parameter.grad = torch.zeros(1)
    state = {"exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}
    try:
        _fused_adam([parameter], [state], 1, lr=0.0, betas=(0.0, 0.0), eps=1.0, weight_decay=0.0)
    except (TypeError, RuntimeError):  # an argument or a kernel that older versions lack
        return False
    return True


def _can_be_fused(group: Dict[str, Any]) -> bool:
    """Whether all gradients of a group are as wide as their parameters, and lie on a CPU."""
    stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
    # torch's fused step goes through the memory of all four tensors alike, whatever their strides.
    # With a second decay rate of 1 the correction of the bias is 0: fairseq makes no step then.
    has_correction = group["betas"][1] < 1 and not group.get("amsgrad", False)
    return has_correction and all(
        parameter.device.type == "cpu"
        and parameter.dtype in (torch.float32, torch.float64)
        and parameter.grad.dtype == parameter.dtype
        and parameter.grad.layout == torch.strided
        and parameter.is_contiguous()
        and parameter.grad.is_contiguous()
        for parameter in stepped
    )


@wrapping
def _stepping(self: Any, closure: Any = None, *, original: Callable[..., Any]) -> Any:
    """Step in one pass where all parameters allow it, and leave the state as fairseq has it."""
    groups = self.param_groups
    if closure is not None or not _has_fused_adam() or not all(map(_can_be_fused, groups)):
        return original(self, closure)
    for group in groups:
        by_step: Dict[int, List[Tensor]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                weight, state = parameter.data, self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                for name in ("exp_avg", "exp_avg_sq"):
                    loaded = state.get(name)
                    loaded = torch.zeros_like(weight) if loaded is None else loaded.to(weight)
                    state[name] = loaded.contiguous()
                by_step[state["step"]].append(parameter)
        for step, parameters in by_step.items():
            _fused_adam(parameters, [self.state[p] for p in parameters], step, **group)
    return None


FUSED_ADAM = Patch(
    name="Adam in one pass",
    reason="On a CPU --optimizer adam steps each parameter in one pass over its memory.",
    install=replaces({"fairseq.optim.adam:Adam.step": _stepping}),
)


# ``--fast-dropout``: fairseq's dropout on a CPU, with masks from a quarter of the random numbers.
#
# The same seed gives other masks than without the flag, so it is off by default. The dropout of
# attention probabilities is a part of torch's attention, and keeps torch's masks.


FAIRSEQ_DROPOUT = "dropout by fairseq's modules on a CPU"
FAST_DROPOUT = Option(
    "fast_dropout",
    False,
    "draw the masks of dropout on a CPU from a quarter of the random numbers; the masks differ "
    "from those that fairseq draws with the same seed",
    needs=(FAIRSEQ_DROPOUT,),
)


class FastDropout(FairseqDropout):
    """fairseq's module, which calls :func:`fast_dropout` on a CPU. It has no state either."""

    def forward(self, x: Tensor, inplace: bool = False) -> Tensor:
        """See the base class; ``inplace`` has no effect on a CPU."""
        drops = self.p > 0 and (self.training or self.apply_during_inference)
        if not drops or x.device.type != "cpu":
            return super().forward(x, inplace)
        return fast_dropout(x, self.p)


def draw_masks_fast(model: nn.Module) -> None:
    """Make every dropout module of fairseq in a model a :class:`FastDropout`."""
    for module in model.modules():
        if isinstance(module, FairseqDropout):
            # Its settings, hooks and place in the model stay as they are.
            module.__class__ = FastDropout


def draws_masks_fast(model: nn.Module) -> bool:
    """Whether the flag has an effect on a model where it is now."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    return on_cpu and any(
        isinstance(module, FastDropout) and module.p > 0 for module in model.modules()
    )
