"""The processor of this machine, as far as it decides about products of matrices."""

from __future__ import annotations

import contextlib
import platform
from functools import cache
from typing import Dict, FrozenSet, Iterable, NamedTuple


class Processor(NamedTuple):
    """What decides about the products.

    Attributes:
        vendor: as the processor names it, such as ``AuthenticAMD``; empty where it is not known.
        flags: instructions that it has, as Linux names them.
        name: for readers; another for each kind of processor.
    """

    vendor: str
    flags: FrozenSet[str]
    name: str

    @property
    def has_bfloat16(self) -> bool:
        """Whether it multiplies bfloat16 numbers itself; true where that is not known."""
        return not self.flags or bool(self.flags & {"avx512_bf16", "amx_bf16", "bf16"})

    @property
    def has_amx(self) -> bool:
        """Whether it has AMX, for which oneDNN rounds float32 factors where it may."""
        return any(flag.startswith("amx_") for flag in self.flags)


@cache
def processor() -> Processor:
    """Return the processor of this machine, as Linux describes it."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        return described_processor(lines)
    return described_processor(())


def described_processor(lines: Iterable[str]) -> Processor:
    """Return the first processor of a description.

    Args:
        lines: as in ``/proc/cpuinfo``.
    """
    fields: Dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = frozenset((fields.get("flags") or fields.get("Features") or "").split())
    name = fields.get("model name") or platform.processor() or platform.machine()
    # A virtual machine may call two generations by one name.
    if {"cpu family", "model"} <= fields.keys():
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    return Processor(fields.get("vendor_id", ""), flags, name)


@cache
def has_amx() -> bool:
    """Whether the processor of this machine has AMX."""
    return processor().has_amx
