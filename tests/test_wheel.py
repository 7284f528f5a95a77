"""The wheel is built and installed into another folder: every file is in it, and it works there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# The report of `analyze` takes the data files.
EVERYTHING = """
import importlib.util, pkgutil
import spectral_fairseq

has_fairseq = importlib.util.find_spec("fairseq") is not None
for module in pkgutil.walk_packages(spectral_fairseq.__path__, "spectral_fairseq."):
    if has_fairseq or not module.name.startswith("spectral_fairseq.plugin."):
        importlib.import_module(module.name)

import numpy
from spectral_fairseq.commands.main import main

numpy.save("table.npy", numpy.random.default_rng(0).normal(size=(300, 8)))
assert main(["analyze", "table.npy", "--out", "report"]) == 0
print(spectral_fairseq.__file__)
"""


def files_of(package):
    files = (one for one in package.rglob("*") if one.is_file() and one.suffix != ".pyc")
    return sorted(str(one.relative_to(package)) for one in files)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")
def test_the_built_wheel_is_whole_and_works(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(ROOT / "spectral_fairseq", source / "spectral_fairseq")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    options = ["--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*pip, "wheel", *options, "-w", str(tmp_path), str(source)], check=True, cwd=tmp_path
    )
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    assert sorted(one.name for one in site.iterdir() if not one.name.endswith(".dist-info")) == [
        "bin",
        "spectral_fairseq",
    ]
    assert files_of(site / "spectral_fairseq") == files_of(ROOT / "spectral_fairseq")
    done = subprocess.run(
        [sys.executable, "-c", EVERYTHING],
        env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith(str(site))
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000
