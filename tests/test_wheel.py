"""The wheel is built and installed into another folder: every file is in it, and it works there."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import spectral_fairseq

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
    files = (one.relative_to(package) for one in package.rglob("*") if one.is_file())
    return sorted(str(one) for one in files if "__pycache__" not in one.parts)


def copy_package(source):
    """Without what is compiled, which other tests may just be writing."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "spectral_fairseq", source / "spectral_fairseq", ignore=ignored)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")
def test_the_built_wheel_is_whole_and_works(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    copy_package(source)
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


AT_TAG = f"https://example.org/us/it/{{}}/v{spectral_fairseq.__version__}/"


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """The source archive and the metadata of an address, as the workflow that publishes has it."""
    folder = tmp_path_factory.mktemp("archives")
    source = folder / "source"
    copy_package(source)
    for path in (*ROOT.glob("*.*"), ROOT / "LICENSE"):
        if path.is_file():
            shutil.copy(path, source / path.name)
    for name in ("studies", "examples", "tests"):
        (source / name).mkdir()
        (source / name / "data.xz").touch()
    environment = {**os.environ, "REPOSITORY": "https://example.org/us/it/"}
    subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "-d", str(folder)],
        env=environment,
        cwd=source,
        check=True,
        capture_output=True,
    )
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = [Path(*Path(one).parts[1:]) for one in opened.getnames()]
        text = opened.extractfile(f"{archive.name[: -len('.tar.gz')]}/PKG-INFO").read()
    return names, email.message_from_bytes(text)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")
def test_the_source_archive_has_the_package_and_nothing_under_another_licence(archives):
    names, metadata = archives
    top = {one.parts[0] for one in names if one.parts}
    assert {"spectral_fairseq", "LICENSE", "README.md", "CHANGELOG.md", "setup.py"} <= top
    assert not top & {"studies", "examples", "tests", "benchmarks", "docs"}
    assert metadata.get("License-Expression", metadata.get("License")) == "MIT"


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")
def test_links_and_pictures_of_the_metadata_lead_to_the_tag(archives):
    _, metadata = archives
    urls = dict(one.split(", ") for one in metadata.get_all("Project-URL"))
    assert {"Homepage", "Source", "Documentation", "Issues", "Changelog"} == set(urls)
    text = metadata.get_payload()
    links = re.findall(r"\]\(([^)]+)\)", text)
    pictures = re.findall(r'src="([^"]+)"', text)
    assert len(links) > 20 and pictures
    ours = [one for one in links if "example.org" in one]
    assert all(one.startswith("https://") for one in links)
    assert all(one.startswith(AT_TAG.format("blob")) for one in ours)
    assert all(one.startswith(AT_TAG.format("raw")) for one in pictures)
    for one in ours:
        assert (ROOT / one[len(AT_TAG.format("blob")) :].partition("#")[0]).exists(), one
    for one in pictures:
        assert (ROOT / one[len(AT_TAG.format("raw")) :]).exists(), one


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")
def test_an_index_renders_the_description(archives):
    render = pytest.importorskip("readme_renderer.markdown").render
    page = render(archives[1].get_payload())
    assert page is not None and "<table>" not in page.partition("<h2")[0]
    assert f'src="{AT_TAG.format("raw")}' in page and f'href="{AT_TAG.format("blob")}' in page
