"""The room ``training`` without fairseq, beside several versions of its users' frameworks."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any, Dict, NamedTuple

from studies.matrix.cells import Cell
from studies.matrix.steps import Failure, Installation, add_counts, find_python
from tests.conftest import ROOT

_BESIDE = ("pytest", "filelock", "setuptools", "jinja2", "tabulate>=0.9", "tqdm", "safetensors")
_PIP = ("-m", "pip", "--disable-pip-version-check", "-q", "install")
# The cell whose Python, torch and numpy these environments have.
HOST = "py3.11-torch2.13.0-numpy2.4.6"


class Frameworks(NamedTuple):
    """Versions of one environment."""

    transformers: str
    accelerate: str
    lightning: str

    @property
    def name(self) -> str:
        """Name in the record and of its folder."""
        return f"transformers{self.transformers}-accelerate{self.accelerate}"


# `compute_loss_func` came with transformers 4.46; before it there are tables and control alone.
FRAMEWORKS: Dict[str, Frameworks] = {
    one.name: one
    for one in (
        Frameworks("4.36.2", "1.15.0", ""),
        Frameworks("4.47.1", "1.2.1", "2.6.6"),
        Frameworks("5.24.0", "1.15.0", "2.5.5"),
    )
}


class Room(Installation):
    """An environment with the frameworks and torch; the package is that of the source tree.

    Args:
        frameworks: their versions.
        cell: the other versions.
        folder: of the cell; this environment is in a folder of its name.
    """

    def __init__(self, frameworks: Frameworks, cell: Cell, folder: Path) -> None:
        super().__init__(cell, folder / frameworks.name)
        self.frameworks = frameworks

    def check(self) -> Dict[str, Any]:
        """Install what is not there yet and run ``tests/training``; returns what is recorded."""
        found = {"date": datetime.date.today().isoformat(), **self.frameworks._asdict()}
        self.folder.mkdir(parents=True, exist_ok=True)
        report = self.folder / "tests.xml"
        report.unlink(missing_ok=True)
        pins = {**self.frameworks._asdict(), "torch": self.cell.torch, "numpy": self.cell.numpy}
        try:
            if not self.environment.exists():
                self._call([find_python(self.cell.python), "-m", "venv", str(self.environment)])
            wanted = [f"{name}=={version}" for name, version in pins.items() if version]
            self._run("python", *_PIP, *wanted, *_BESIDE)
            tests = ROOT / "tests" / "training"
            flags = ("-p", "no:cacheprovider", f"--junitxml={report}")
            self._run("python", "-m", "pytest", "-q", *flags, tests)
        except Failure as failure:
            if not report.exists():
                return {**found, "error": str(failure)}
        counts: Dict[str, Any] = {"passed": 0, "skipped": 0, "failed": 0, "failures": []}
        add_counts(counts, report)
        return {**found, **counts}
