"""Freed memory is kept by glibc."""

import ctypes
import os
import subprocess
import sys

import pytest

from spectral_fairseq.plugin import memory

pytestmark = pytest.mark.slow  # each test is a process of its own

# The file alone, since its package imports fairseq.
START = f"""
import runpy
memory = runpy.run_path({memory.__file__!r})
keep_freed_memory, KEPT_BYTES = memory["keep_freed_memory"], memory["KEPT_BYTES"]
"""
TENSOR = """
import torch
def write(size):
    torch.zeros(size // 4)
"""
BYTES = """
def write(size):
    b"1" * size
"""
COUNT_FAULTS = """
import resource
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    write(2**26)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first, again = faults(), min(faults() for _ in range(5))
keep_freed_memory()
write(2**27)  # leaves room for half of it, wherever something small comes to lie
print(first, again, min(faults() for _ in range(5)))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
@pytest.mark.parametrize("set_by_user", [None, *memory.ALLOCATOR_VARIABLES])
def test_freed_memory_is_kept_unless_a_variable_says_otherwise(set_by_user):
    """64 MiB need new pages each time, and once where they are kept."""
    variables = {}
    if set_by_user:
        value = "glibc.malloc.tcache_count=7" if set_by_user == "GLIBC_TUNABLES" else "1000000"
        variables[set_by_user] = value
    memory_of = BYTES if set_by_user else TENSOR
    first, again, later = map(int, run(memory_of + COUNT_FAULTS, **variables))
    pages = first / 2  # larger pages of the system need fewer faults
    assert again > pages and (later < pages) == (set_by_user is None)


LARGE = """
from pathlib import Path
import torch
def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024
keep_freed_memory()
before = resident()
tensor = torch.ones(KEPT_BYTES // 4 + 2**20)
made = resident() - before
del tensor
print(made, resident() - before)
"""


def run(program, **variables):
    environment = {k: v for k, v in os.environ.items() if k not in memory.ALLOCATOR_VARIABLES}
    argv = [sys.executable, "-c", START + program]
    environment.update(variables)
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_a_tensor_above_a_gibibyte_is_handed_back():
    made, left = map(int, run(LARGE))
    assert made > memory.KEPT_BYTES > 4 * left
