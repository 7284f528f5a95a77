"""The wheel is built, installed into another folder, and tested there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SELECTED = (
    "test_architecture.py",
    "embeddings",
    "functional/test_spectrum_penalties.py",
    "heads",
    "plugin/test_transformers.py",
    "plugin/test_spectrum_control.py",
)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")
def test_the_built_wheel_passes_its_tests(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ROOT / "spectral_fairseq", source / "spectral_fairseq")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    options = ["--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*pip, "wheel", *options, "-w", str(tmp_path), str(source)], check=True, cwd=tmp_path
    )
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    for name in ("py.typed", "analysis/report.html.jinja2"):
        assert (site / "spectral_fairseq" / name).exists()
    assert sorted(one.name for one in site.iterdir() if not one.name.endswith(".dist-info")) == [
        "bin",
        "spectral_fairseq",
    ]

    for folder in ("tests", "docs"):  # whose picture of the imports is tested
        shutil.copytree(ROOT / folder, tmp_path / "elsewhere" / folder)
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    env.pop("PYTEST_CURRENT_TEST", None)
    where = subprocess.run(
        [sys.executable, "-c", "import spectral_fairseq; print(spectral_fairseq.__file__)"],
        env=env,
        cwd=tmp_path / "elsewhere",
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.strip().startswith(str(site))
    tests = [str(Path("tests", name)) for name in SELECTED]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        env=env,
        cwd=tmp_path / "elsewhere",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
