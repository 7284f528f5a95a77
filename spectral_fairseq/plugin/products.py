"""``--float32-products``: how fairseq's commands multiply float32 matrices on a CPU.

    --float32-products {auto,fast,torch}    default: auto

fairseq's ``call_main`` runs every command, so the products are chosen around it, and are put
back as they were found when it ends: two trainings in one process do not disturb each other. A
training keeps the choice in its checkpoints, and one that is resumed on the same kind of
processor takes it from there. ``fairseq-hydra-train`` loads the plugin within ``call_main``, and
has no such flag: its trainer chooses as ``auto`` does.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Callable, Optional

import torch

from spectral_fairseq.compat.bfloat16 import evaluates
from spectral_fairseq.compat.patching import Patch, replaces, wrapping
from spectral_fairseq.functional.float32_products import Products, choose_products, set_products
from spectral_fairseq.functional.processor import processor
from spectral_fairseq.options import FLOAT32_PRODUCTS
from spectral_fairseq.plugin.listener import Listener
from spectral_fairseq.plugin.memory import keep_freed_memory

logger = logging.getLogger(__name__)


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
