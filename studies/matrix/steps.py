"""What is done in a cell: install, test, train a checkpoint, and read those of other cells."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from studies.fuzz import data
from studies.matrix.cells import NONE, UPSTREAM, Cell
from tests.conftest import PACKAGE, ROOT, TINY_TRANSLATION

# Selections of tests: name -> flags of each run of pytest.
SELECTIONS: Dict[str, Sequence[Sequence[str]]] = {
    "fast": (("-m", "'not slow'"), ("-m", "slow", "tests/compat")),
    "all": ((),),
}
_TRAINING = (
    *("--user-dir", PACKAGE, "--arch", "transformer_sc", "--criterion", "spectrum_control"),
    *("--task", "translation", "--source-lang", "de", "--target-lang", "en", "--cpu"),
    *("--share-all-embeddings", *TINY_TRANSLATION, "--optimizer", "adam", "--lr", "0.005"),
    *("--max-tokens", "96", "--max-update", "2", "--seed", "1", "--num-workers", "0"),
    *("--data-buffer-size", "0", "--no-epoch-checkpoints", "--log-format", "simple"),
)
_EVALUATION = ("--user-dir", PACKAGE, "--cpu", "--num-workers", "0", "--batch-size", "8")
_TEST_SENTENCES = 5  # studies/fuzz/data.py


class Failure(Exception):
    """A command of a cell failed; the message is its last line."""


class Installation:
    """The environment of a cell, and its folder.

    Args:
        cell: the versions.
        folder: holds the environment, the logs, the data and the checkpoint of this cell.
        upstream: clone of fairseq's repository, for the cells that are built from it.
    """

    def __init__(self, cell: Cell, folder: Path, upstream: Optional[Path] = None) -> None:
        self.cell, self.folder, self._upstream = cell, folder, upstream
        self.environment = folder / "venv"
        self._constraints = folder / "constraints.txt"
        self._data = folder / "data" / "joined"

    @property
    def checkpoint(self) -> Path:
        """Where :meth:`train` saves."""
        return self.folder / "checkpoint" / "checkpoint_last.pt"

    def is_made(self) -> bool:
        """Whether the environment exists and is whole."""
        return (self.environment / ".installed").exists()

    def install(self) -> Dict[str, Optional[str]]:
        """Make the environment by ``make setup``; returns its versions."""
        self.folder.mkdir(parents=True, exist_ok=True)
        wanted = self.cell.constraints((ROOT / "constraints.txt").read_text("utf-8"))
        if not self._constraints.exists() or self._constraints.read_text("utf-8") != wanted:
            self.remove()
            self._constraints.write_text(wanted, "utf-8")
        self._make("setup")
        if self.cell.fairseq not in ("", NONE):
            self._replace_fairseq()
        code = (
            "import json; from spectral_fairseq.provenance import versions; "
            "print(json.dumps(versions()))"
        )
        versions = dict(json.loads(self._run("python", "-c", code).splitlines()[-1]))
        if self.cell.fairseq == UPSTREAM:
            commit = self._call(["git", "-C", str(self._upstream), "rev-parse", "--short", "HEAD"])
            versions["fairseq"] = f"upstream, commit {commit.strip()}"
        return versions

    def _replace_fairseq(self) -> None:
        wanted: Any = self.cell.fairseq
        if wanted == UPSTREAM:
            if self._upstream is None:
                raise Failure("expected --upstream FOLDER with a clone of fairseq; found none")
            wanted = self._upstream
        pip = ("-m", "pip", "--disable-pip-version-check")
        self._run("python", *pip, "uninstall", "-y", "fairseq", "ve-fairseq")
        pins = ("-c", self._constraints)
        self._run("python", *pip, "install", *pins, "--no-build-isolation", wanted)

    def test(self, selection: str, flags: str) -> Dict[str, Any]:
        """Run a selection of the tests.

        Args:
            selection: a key of :data:`SELECTIONS`.
            flags: more flags of pytest.

        Returns:
            Numbers of tests that passed, were skipped and failed, and the names of the last.
        """
        found: Dict[str, Any] = {"passed": 0, "skipped": 0, "failed": 0, "failures": []}
        runs = SELECTIONS[selection]
        if self.cell.fairseq == NONE:
            runs = runs[:1]  # tests/compat alone cannot even be collected without fairseq
        for number, chosen in enumerate(runs):
            report = self.folder / f"tests-{number}.xml"
            report.unlink(missing_ok=True)
            words = " ".join([*chosen, f"--junitxml={report}", "-p no:cacheprovider", flags])
            try:
                self._make("test", f"PYTEST_FLAGS={words}")
            except Failure:
                if not report.exists():
                    raise
            add_counts(found, report)
        return {"selection": selection, **found}

    def train(self) -> float:
        """Train two updates of ``transformer_sc``; returns the loss of its checkpoint."""
        for name in ("data", "checkpoint"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        self._data.parent.mkdir()
        data.write(self._data.parent, lambda argv: self._run(*argv))
        self._run("fairseq-train", self._data, *_TRAINING, "--save-dir", self.checkpoint.parent)
        return self._loss(self.checkpoint)

    def read(self, checkpoint: Path, loss: float) -> None:
        """Analyse, evaluate and translate with a checkpoint, which another cell may have saved.

        Args:
            checkpoint: the file.
            loss: its loss in the cell that saved it.

        Raises:
            Failure: if a command fails, or finds something else.
        """
        self._run("spectral-fairseq", "analyze", checkpoint, "--format", "json")
        found = self._loss(checkpoint)
        if abs(found - loss) > 2e-3:  # printed with three digits
            raise Failure(f"the loss is {found} instead of {loss}")
        printed = self._run("fairseq-generate", self._data, "--path", checkpoint, *_EVALUATION)
        translated = len(re.findall(r"^H-\d+\t", printed, re.MULTILINE))
        if translated != _TEST_SENTENCES:
            raise Failure(f"{translated} of {_TEST_SENTENCES} sentences were translated")

    def remove(self) -> None:
        """Remove the environment, and keep the rest."""
        shutil.rmtree(self.environment, ignore_errors=True)

    def _loss(self, checkpoint: Path) -> float:
        task = ("--task", "translation", "--valid-subset", "valid")
        printed = self._run(
            *("fairseq-validate", self._data, "--path", checkpoint, *_EVALUATION, *task)
        )
        found = re.findall(r"\| loss ([\d.]+)", printed)
        if not found:
            raise Failure("fairseq-validate printed no loss")
        return float(found[-1])

    def _run(self, program: str, *arguments: Any) -> str:
        return self._call([str(self.environment / "bin" / program), *map(str, arguments)])

    def _make(self, target: str, *variables: str) -> str:
        python = find_python(self.cell.python)
        own = (f"VENV={self.environment}", f"CONSTRAINTS={self._constraints}", f"PYTHON={python}")
        make = ("make", "--no-print-directory", "-C", str(ROOT))
        fairseq = "FAIRSEQ=no" if self.cell.fairseq == NONE else "FAIRSEQ=yes"
        return self._call([*make, target, *own, fairseq, *variables])

    def _call(self, argv: List[str]) -> str:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        # Such paths lead to another environment, and this variable to other tests' folders.
        for name in ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MFLAGS", "PYTEST_ADDOPTS"):
            env.pop(name, None)
        done = subprocess.run(
            argv,
            env=env,
            cwd=self.folder,
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        with open(self.folder / "log.txt", "a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(argv)}\n{done.stdout}\n[status {done.returncode}]\n\n")
        if done.returncode:
            said = [line for line in done.stdout.splitlines() if not line.startswith("make")]
            last = next(filter(str.strip, reversed(said)), "no output")
            raise Failure(f"{Path(argv[0]).name}: {last[:300]}")
        return done.stdout


def add_counts(found: Dict[str, Any], report: Path) -> None:
    """Add the tests of a report of pytest to the counts and the list of failures."""
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            found["failed"] += 1
            found["failures"].append(f"{case.get('classname')}.{case.get('name')}")
        else:
            found["skipped" if "skipped" in kinds else "passed"] += 1


def find_python(version: str) -> str:
    """Path of a Python, on the path or among pyenv's.

    Args:
        version: such as 3.10.

    Raises:
        Failure: if there is none.
    """
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for found in sorted(versions.glob(f"{version}.*/bin/python")):
        return str(found)
    on_path = shutil.which(f"python{version}")
    if on_path:
        return on_path
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    raise Failure(f"Python {version} is not installed")
