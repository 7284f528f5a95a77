"""The wheel in an environment that somebody already has, and fairseq's own tests in it.

Such an environment has torch and fairseq, installed with pip and not with this project's Makefile.
pip adds the wheel. Then one recipe is trained, translated with and exported there; no package that
was installed before may have changed, and no file of fairseq.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, Dict, List, Sequence

from studies.fuzz import data
from studies.matrix.cells import UPSTREAM
from studies.matrix.steps import Failure, Installation, add_counts, find_python
from tests.conftest import ROOT, TINY_TRANSLATION

_IN_THE_WHEEL = ("setup.py", "pyproject.toml", "README.md", "LICENSE")
_PIP = ("-m", "pip", "--disable-pip-version-check", "-q")
_RECIPE = (
    *("--arch", "transformer_wn_iwslt_de_en", "--criterion", "label_smoothed_cross_entropy"),
    *("--share-all-embeddings", *TINY_TRANSLATION, "--optimizer", "adam", "--lr", "0.005"),
    *("--weight-decay", "0.1", "--max-tokens", "96", "--max-update", "4", "--seed", "1", "--cpu"),
    *("--num-workers", "0", "--data-buffer-size", "0", "--no-epoch-checkpoints"),
)
_TRANSLATION = ("--cpu", "--num-workers", "0", "--max-len-b", "8")
# Files of fairseq's repository below tests/; the second runs all others.
HOST_TESTS = {
    "command lines": ("tests/test_binaries.py",),
    "units": (
        *("tests", "--ignore=tests/test_binaries.py", "--ignore=tests/gpu"),
        "--continue-on-collection-errors",
    ),
}
HOST_COMMITS = ("HEAD", "v0.12.2")  # of that repository, whose tests are run
# One of the tests interrupts itself, which a job in the background of a shell ignores.
_RUN_PYTEST = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "os.chdir(sys.argv.pop(1)); sys.path.append(sys.argv.pop(1)); "
    "import pytest; sys.exit(pytest.main())"
)


class Existing(Installation):
    """Torch and fairseq of a cell, and then the wheel.

    Args:
        cell: the versions.
        folder: of the cell; this environment is in its folder ``existing``.
        upstream: clone of fairseq's repository, which has its tests.
    """

    def __init__(self, cell: Any, folder: Path, upstream: Any = None) -> None:
        super().__init__(cell, folder / "existing", upstream)

    def check(self) -> Dict[str, List[str]]:
        """Install the wheel and use it; returns the packages that pip added.

        Raises:
            Failure: if a command fails, the exported model translates differently, or a package
                that was installed before has changed.
        """
        before = self.make()
        source, wheels = self.folder / "source", self.folder / "wheels"
        for path in (source, wheels):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(ROOT / "spectral_fairseq", source / "spectral_fairseq")
        for name in _IN_THE_WHEEL:
            shutil.copy(ROOT / name, source / name)
        alone = ("--no-deps", "--no-build-isolation")
        self._run("python", *_PIP, "wheel", *alone, "-w", wheels, source)
        (wheel,) = wheels.glob("*.whl")
        fairseq = self._fairseq_files()
        self._run("python", *_PIP, "install", wheel)
        added = added_packages(before, self._packages())
        if self._fairseq_files() != fairseq:
            raise Failure("the installation changed files of fairseq")
        self.use()
        if added_packages(before, self._packages()) != added:
            raise Failure("the use of the package installed another one")
        return {"added": added}

    def make(self) -> Dict[str, str]:
        """Install torch and fairseq in a new environment; returns the versions of its packages."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.remove()
        wanted = self.cell.constraints((ROOT / "constraints.txt").read_text("utf-8"))
        self._constraints.write_text(wanted, "utf-8")
        self._call([find_python(self.cell.python), "-m", "venv", str(self.environment)])
        pins = ("-c", self._constraints)
        self._run("python", *_PIP, "install", *pins, "setuptools", "wheel")
        if self._is_legacy:  # pip >= 24.1 refuses it, and it is built before torch comes
            self._run("python", *_PIP, "install", "pip<24.1")
            self._run("python", *_PIP, "install", *pins, "cython", "numpy")
            build = ("wheel", "--no-deps", "--no-build-isolation", "-w", self.folder / "fairseq")
            self._run("python", *_PIP, *build, "fairseq==0.12.2")
        self._run("python", *_PIP, "install", *pins, "torch", "numpy")
        self._install_fairseq(pins)
        return self._packages()

    @property
    def _is_legacy(self) -> bool:
        return not self.cell.fairseq and self.cell.python in ("3.9", "3.10")

    def _install_fairseq(self, pins: Sequence[Any]) -> None:
        install = (*_PIP, "install", *pins, "--no-build-isolation")
        if self.cell.fairseq == UPSTREAM:
            if self._upstream is None:
                raise Failure("expected --upstream FOLDER with a clone of fairseq; found none")
            self._run("python", *install, "cython")  # it builds extensions
            self._run("python", *install, "-e", self._upstream)
        elif self.cell.fairseq:
            self._run("python", *install, self.cell.fairseq)
        elif self._is_legacy:
            self._run("python", *install, *(self.folder / "fairseq").glob("*.whl"))
        else:
            self._run("python", *install, "ve-fairseq")

    def _fairseq_files(self) -> Dict[str, str]:
        """A hash of each file below the folder that ``import fairseq`` reads."""
        code = (
            "import hashlib, importlib.util, json, pathlib; "
            "home = pathlib.Path(importlib.util.find_spec('fairseq').origin).parent; "
            "print(json.dumps({str(path): hashlib.sha256(path.read_bytes()).hexdigest() "
            "for path in home.rglob('*') if path.is_file() and path.suffix != '.pyc'}))"
        )
        return dict(json.loads(self._run("python", "-c", code).splitlines()[-1]))

    def use(self) -> None:
        """Train a recipe, translate with it, export it, and translate without the plugin."""
        for name in ("data", "checkpoint"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        self._data.parent.mkdir()
        data.write(self._data.parent, lambda argv: self._run(*argv))
        plugin = ("--user-dir", self._run("spectral-fairseq", "user-dir").strip())
        save = ("--save-dir", self.checkpoint.parent)
        self._run("fairseq-train", self._data, *plugin, *_RECIPE, *save)
        plain = self.checkpoint.with_name("plain.pt")
        self._run("spectral-fairseq", "export", self.checkpoint, plain)
        ours = self._translations(self.checkpoint, *plugin)
        theirs = self._translations(plain, "--required-batch-size-multiple", "1")
        if not ours or ours != theirs:
            raise Failure(f"{len(ours)} translations, and others from the exported model")

    def host_tests(self) -> Dict[str, Any]:
        """Run fairseq's own tests without and with the plugin.

        Returns:
            For each of :data:`HOST_COMMITS` and each part of :data:`HOST_TESTS` the counts of
            both, and which tests fail with the plugin only.

        Raises:
            Failure: if there is no clone of fairseq's repository.
        """
        if self._upstream is None:
            raise Failure("expected --upstream FOLDER with a clone of fairseq; found none")
        # Beside the environment, which stays as it is.
        runner = self.folder / "pytest"
        self._run("python", *_PIP, "install", "--upgrade", "--target", runner, "pytest")
        return {commit: self._host_tests_of(commit, runner) for commit in HOST_COMMITS}

    def _host_tests_of(self, commit: str, runner: Path) -> Dict[str, Any]:
        tests = self.folder / "host" / commit
        shutil.rmtree(tests, ignore_errors=True)
        tests.mkdir(parents=True)
        archive = tests.with_suffix(".tar")
        git = ("git", "-C", str(self._upstream), "archive", "-o", str(archive))
        self._call([*git, commit, "tests", "examples", "scripts"])
        shutil.unpack_archive(archive, tests)
        found: Dict[str, Any] = {}
        for part, selected in HOST_TESTS.items():
            counts = {}
            for name, plugin in (("without", ()), ("with", ("-p", "spectral_fairseq.plugin"))):
                report = self.folder / f"{commit}-{part.replace(' ', '_')}-{name}.xml"
                report.unlink(missing_ok=True)
                counts[name] = self._pytest(runner, tests, report, *plugin, *selected)
            broken = set(counts["with"]["failures"]) - set(counts["without"]["failures"])
            found[part] = {**counts, "newly_failed": sorted(broken)}
        return found

    def _pytest(self, runner: Path, tests: Path, report: Path, *flags: str) -> Dict[str, Any]:
        common = ("-q", "-p", "no:cacheprovider", f"--rootdir={tests}", f"--junitxml={report}")
        try:
            self._run("python", "-c", _RUN_PYTEST, tests, runner, *common, *flags)
        except Failure:
            if not report.exists():
                raise
        found: Dict[str, Any] = {"passed": 0, "skipped": 0, "failed": 0, "failures": []}
        add_counts(found, report)
        return found

    def _packages(self) -> Dict[str, str]:
        return packages_of(self._run("python", *_PIP, "freeze", "--all"))

    def _translations(self, model: Path, *flags: Any) -> Dict[str, str]:
        printed = self._run("fairseq-generate", self._data, "--path", model, *_TRANSLATION, *flags)
        return dict(re.findall(r"^(H-\d+)\t\S+\t(.*)$", printed, re.MULTILINE))


def packages_of(frozen: str) -> Dict[str, str]:
    """Name -> version, or where it came from, of what ``pip freeze`` printed."""
    found = {}
    for line in frozen.splitlines():
        name, _, version = line.replace(" @ ", "==").partition("==")
        if version:
            found[name] = version
    return found


def added_packages(before: Dict[str, str], after: Dict[str, str]) -> List[str]:
    """The names of the packages that are new.

    Raises:
        Failure: if a package that was there is gone or has another version.
    """
    changed = [
        f"{name} {version} became {after.get(name, 'nothing')}"
        for name, version in before.items()
        if after.get(name) != version
    ]
    if changed:
        raise Failure(f"the installation changed packages: {', '.join(changed)}")
    return sorted(set(after) - set(before))
