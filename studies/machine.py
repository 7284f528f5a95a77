"""The machine's cores, its GPU and the installed tools."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Sequence

import torch

from spectral_fairseq.errors import ConfigurationError


def find_command(name: str) -> str:
    """Path of an installed command; the one in this Python's environment is preferred.

    Raises:
        ConfigurationError: it is not installed.
    """
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ConfigurationError(
            f"the command {name}",
            f"none beside {sys.executable} and none on the PATH",
            "Run `make setup`, and use .venv/bin/python.",
        )
    return found


def check_installation(
    commands: Sequence[str] = (
        "fairseq-preprocess",
        "fairseq-train",
        "fairseq-generate",
        "spectral-fairseq",
    ),
    modules: Sequence[str] = ("sentencepiece", "sacrebleu", "matplotlib"),
) -> None:
    """Check that all tools are installed, before any work is done.

    Args:
        commands: commands to be run; by default those of a translation.
        modules: Python packages that only examples need; by default those of a translation.

    Raises:
        ConfigurationError: one is missing.
    """
    for command in commands:
        find_command(command)
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ConfigurationError(
                f"the Python package {module}",
                f"none for {sys.executable}",
                "Run `make setup`, and use .venv/bin/python.",
            )


def available_cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def device(cpu: bool) -> str:
    """``cuda`` if there is a GPU and ``cpu`` is false, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() and not cpu else "cpu"


def gpu_bytes() -> int:
    """Memory of the first GPU, in bytes."""
    return int(torch.cuda.get_device_properties(0).total_memory)
