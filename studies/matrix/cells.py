"""The cells of the matrix: which Python is tested with which torch, numpy and fairseq."""

from __future__ import annotations

import re
from typing import Dict, NamedTuple

UPSTREAM = "upstream"  # built from a clone of fairseq's own repository
NONE = "torch alone"  # no fairseq at all


class Cell(NamedTuple):
    """One installation. Everything that is not named here is pinned by constraints.txt.

    Args:
        python: minor version; unless ``fairseq`` is given, it decides on fairseq 0.12.2 or
            ve-fairseq 0.12.3.
        torch: version.
        torchaudio: version, which torch and fairseq's metadata ask for; it is never imported.
        numpy: version.
        sympy: version, which torch 2.6 asks for.
        fairseq: requirement of pip that takes the place of the usual fairseq, or
            :data:`UPSTREAM` or :data:`NONE`.
    """

    python: str
    torch: str
    torchaudio: str
    numpy: str
    sympy: str = "1.14.0"
    fairseq: str = ""

    @property
    def name(self) -> str:
        """Name of the cell in the record and of its folder."""
        other = f"-{self.fairseq.replace('==', '').replace(' ', '')}" if self.fairseq else ""
        return f"py{self.python}-torch{self.torch}-numpy{self.numpy}{other}"

    def constraints(self, text: str) -> str:
        """The project's constraints with the pins of this cell in them.

        Args:
            text: of constraints.txt.

        Raises:
            ValueError: if the constraints do not name one of the packages.
        """
        lines = text.splitlines()
        for package in ("torch", "torchaudio", "numpy", "sympy"):
            others = [line for line in lines if not re.match(rf"{package}==", line)]
            if len(others) == len(lines):
                raise ValueError(f"constraints.txt does not pin {package}")
            lines = [*others, f"{package}=={getattr(self, package)}"]
        if self.fairseq:  # another build has versions of its own
            lines = [line for line in lines if not re.match("(hydra-core|omegaconf)==", line)]
        return "\n".join(lines) + "\n"


# torch 2.0 has no build for numpy 2, and torch 2.2 only one for numpy 1.
_ALL = (
    Cell("3.9", "1.12.1", "0.12.1", "1.23.5"),
    Cell("3.9", "2.0.1", "2.0.2", "1.23.5"),
    Cell("3.10", "1.12.1", "0.12.1", "1.23.5"),
    Cell("3.10", "2.0.1", "2.0.2", "1.23.5"),
    Cell("3.11", "2.2.2", "2.2.2", "1.26.4"),
    Cell("3.11", "2.6.0", "2.6.0", "1.26.4", sympy="1.13.1"),
    Cell("3.11", "2.6.0", "2.6.0", "2.4.6", sympy="1.13.1"),
    Cell("3.11", "2.13.0", "2.11.0", "2.4.6"),
    Cell("3.11", "2.14.1", "2.11.0", "2.4.6"),
    Cell("3.12", "2.2.2", "2.2.2", "1.26.4"),
    Cell("3.12", "2.6.0", "2.6.0", "1.26.4", sympy="1.13.1"),
    Cell("3.12", "2.6.0", "2.6.0", "2.4.6", sympy="1.13.1"),
    Cell("3.12", "2.13.0", "2.11.0", "2.4.6"),
    # Upstream cannot be imported from Python 3.11 on.
    Cell("3.10", "2.6.0", "2.6.0", "1.23.5", "1.13.1", UPSTREAM),
    Cell("3.12", "2.6.0", "2.6.0", "1.26.4", "1.13.1", "fairseq-fixed==0.12.3.1"),
    Cell("3.9", "1.12.1", "0.12.1", "1.23.5", fairseq=NONE),
    Cell("3.11", "2.13.0", "2.11.0", "2.4.6", fairseq=NONE),
    Cell("3.13", "2.13.0", "2.11.0", "2.4.6", fairseq=NONE),
)
CELLS: Dict[str, Cell] = {cell.name: cell for cell in _ALL}
# Those whose torch and fairseq somebody may already have: existing.py. A fairseq of 2022, a clone
# that is installed with -e, fairseq-fixed, and ve-fairseq of 2024 and of today.
EXISTING = (
    "py3.10-torch1.12.1-numpy1.23.5",
    "py3.10-torch2.6.0-numpy1.23.5-upstream",
    "py3.11-torch2.2.2-numpy1.26.4",
    "py3.11-torch2.13.0-numpy2.4.6",
    "py3.12-torch2.6.0-numpy1.26.4-fairseq-fixed0.12.3.1",
)
