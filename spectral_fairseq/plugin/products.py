"""``--float32-products``: how fairseq's commands multiply float32 matrices on a CPU.

    --float32-products {auto,fast,torch}    default: auto

The products are chosen around a command's ``main``, in the process that computes
(:mod:`spectral_fairseq.compat.commands`), and are put back as they were found when it ends: two
trainings in one process do not disturb each other. A training keeps the choice in its checkpoints,
and one that is resumed on the same kind of processor takes it from there. ``fairseq-hydra-train``
loads the plugin within ``call_main``, and has no such flag: its trainer chooses as ``auto`` does.
"""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Optional

import torch

from spectral_fairseq.compat.bfloat16 import evaluates
from spectral_fairseq.compat.commands import around_main
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


class _Command:
    """A command while it runs.

    Attributes:
        products: how it multiplies; ``None`` before that is chosen.
    """

    def __init__(self) -> None:
        self.products: Optional[Products] = None
        self._restore: Callable[[], None] = lambda: None

    def multiply(self, products: Products, common: Any) -> None:
        """Multiply as ``products`` says, and say so; on a CPU, keep freed memory too."""
        self.end()
        halves = any(getattr(common, name, False) for name in _HALVES)
        self.products, self._restore = products, set_products(products, halves)
        logger.info("float32 products are computed %s", products)
        if _on_cpu(common):
            keep_freed_memory()

    def end(self) -> None:
        """Put back how products are computed; freed memory is kept until the process ends."""
        self._restore()
        self.products, self._restore = None, lambda: None


_RUNNING: ContextVar[Optional[_Command]] = ContextVar("the command that runs", default=None)
_HALVES = ("fp16", "bf16", "memory_efficient_fp16", "memory_efficient_bf16")


def running() -> _Command:
    """The command that runs; one that began before the plugin was loaded begins here."""
    command = _RUNNING.get()
    if command is None:
        command = _Command()
        _RUNNING.set(command)
    return command


# Carries the flag: omegaconf 2.0 lets no configuration of fairseq have a field of another package.
# Workers inherit it, and every command that is parsed sets it anew.
_VARIABLE = "SPECTRAL_FAIRSEQ_FLOAT32_PRODUCTS"


def asked() -> str:
    """The value of the flag."""
    return os.environ.get(_VARIABLE, FLOAT32_PRODUCTS.default)


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
def _configuring(args: Any, *, original: Callable[..., Any]) -> Any:
    """Wrap ``override_module_args``, through which every command makes its configuration."""
    value = getattr(args, FLOAT32_PRODUCTS.name, None)
    if value is not None:
        os.environ[_VARIABLE] = value
    return original(args)


@contextmanager
def multiplying(cfg: Any) -> Iterator[None]:
    """Within this context a command multiplies as it was asked to, in the process that computes."""
    command = _Command()
    token = _RUNNING.set(command)
    try:
        on_cpu = _on_cpu(cfg.common)
        if on_cpu or asked() == "fast":
            command.multiply(choose_products(asked()), cfg.common)
        if on_cpu and evaluates(cfg):
            warn_of_slow_bfloat16(cfg.common)
        yield
    finally:
        command.end()
        _RUNNING.reset(token)


def _install() -> str:
    places = {
        "fairseq.options:add_dataset_args": _adding_flag,
        "fairseq.dataclass.utils:override_module_args": _configuring,
        **around_main(multiplying),
    }
    return replaces(places)()


CHOSEN_PRODUCTS = Patch(
    name="float32 products",
    reason="A CPU multiplies float32 matrices through oneDNN where that is faster and equally "
    "precise (--float32-products).",
    install=_install,
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
        if running().products is None:
            running().multiply(choose_products(asked()), common)
        warn_of_slow_bfloat16(common)

    def save(self) -> Any:
        """The choice and the processor that it was made on."""
        products = running().products
        return products and {"fast": products.fast, "processor": processor().name}

    def restore(self, saved: Any) -> None:
        """Go on as the checkpoint has it, unless the flag or the processor says otherwise."""
        common, products = self.trainer.cfg.common, running().products
        if asked() != "auto" or not saved or saved["processor"] != processor().name:
            return
        if products is None or products.fast != saved["fast"]:
            reason = "as in the checkpoint that training goes on from"
            running().multiply(Products(saved["fast"], reason), common)
