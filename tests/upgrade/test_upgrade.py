"""Checkpoints and commands of released versions go on working: resume, validate, translate, export.

``VERSION.zip`` was written at that release by ``make.py``, which says what it holds.
"""

import json
import zipfile
from pathlib import Path

import pytest
import torch

from spectral_fairseq.checkpoints.reading import load_checkpoint
from tests.upgrade.make import (
    ROOT,
    evaluation_flags,
    preprocess_flags,
    task_of,
    train_flags,
    translations,
    validation_loss,
)

pytestmark = pytest.mark.slow

CASES = {}
for archive in sorted(Path(__file__).parent.glob("*.zip")):
    with zipfile.ZipFile(archive) as opened:
        for name, case in json.loads(opened.read("cases.json")).items():
            CASES[archive.stem, name] = case
OF_TABLES = ("svd", "control", "weight_norm", "spectral_norm", "lm_svd")


@pytest.fixture(scope="session")
def kept(made_once, run_cli):
    """What was kept of a version, unpacked, with the binarised text."""

    def unpacked(version):
        def make(folder):
            with zipfile.ZipFile(Path(__file__).with_name(f"{version}.zip")) as opened:
                opened.extractall(folder)
            for flags in preprocess_flags(folder / "text", folder):
                run_cli("fairseq-preprocess", *flags)

        return made_once("upgrade", (version,), make)

    return unpacked


@pytest.fixture(scope="session")
def resumed(made_once, kept, run_cli):
    """The checkpoint after the second epoch, from that version's after the first."""

    def checkpoint(version, name):
        def make(folder):
            data = kept(version)
            flags = train_flags(CASES[version, name]["flags"], data, folder, 2)
            run_cli("fairseq-train", *flags, "--restore-file", data / f"{name}.pt", cwd=ROOT)

        return made_once("resumed", (version, name), make) / "checkpoint_last.pt"

    return checkpoint


@pytest.mark.parametrize("version, name", CASES)
def test_a_training_ends_where_that_version_ended(version, name, resumed, kept):
    found = load_checkpoint(resumed(version, name))["model"]
    expected = torch.load(kept(version) / f"{name}_resumed.pt", map_location="cpu")
    half = load_checkpoint(kept(version) / f"{name}.pt")["model"]
    assert any(not torch.equal(half[key], value) for key, value in expected.items())
    assert found.keys() == expected.keys()
    for key, value in expected.items():  # another processor may round otherwise
        # The gradient of a bias of keys is rounding alone, which Adam makes as large as any other.
        if not key.endswith("k_proj.bias"):
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("version, name", CASES)
def test_its_model_validates_and_translates(version, name, resumed, kept, run_cli):
    case = CASES[version, name]
    common = evaluation_flags(case["flags"], kept(version), resumed(version, name))
    task = ("--task", task_of(case["flags"]), "--log-format", "json")
    done = run_cli("fairseq-validate", *common, *task, cwd=ROOT)
    assert validation_loss(done.stdout + done.stderr) == pytest.approx(case["validation"], abs=2e-3)
    if case["translations"]:
        done = run_cli("fairseq-generate", *common, "--beam", "3", cwd=ROOT)
        assert translations(done.stdout) == case["translations"]


@pytest.mark.parametrize("version, name", [one for one in CASES if one[1] in OF_TABLES])
def test_its_checkpoints_are_exported_averaged_and_measured(version, name, run_cli, kept, tmp_path):
    path = kept(version) / f"{name}.pt"
    run_cli("spectral-fairseq", "export", path, tmp_path / "plain.pt")
    plain = load_checkpoint(tmp_path / "plain.pt")
    assert plain["cfg"]["model"]["_name"] in ("transformer", "transformer_lm")
    average = ("average", "--inputs", path, path, "--output", tmp_path / "mean.pt")
    run_cli("spectral-fairseq", *average)
    measure = ("analyze", "--format", "json", "--no-progress")
    first, *others = [
        json.loads(run_cli("spectral-fairseq", *measure, one).stdout)["checkpoints"][0]["measures"]
        for one in (path, tmp_path / "plain.pt", tmp_path / "mean.pt")
    ]
    for other in others:
        assert other["mean_cosine"] == pytest.approx(first["mean_cosine"], abs=1e-6)
