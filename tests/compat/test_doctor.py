import json
import os
from pathlib import Path

import pytest

import spectral_fairseq
from spectral_fairseq import compat
from spectral_fairseq.commands import doctor
from spectral_fairseq.commands.main import main
from spectral_fairseq.compat import Applied, Status
from spectral_fairseq.compat.patching import Patch
from spectral_fairseq.functional import float32_products
from spectral_fairseq.plugin import trainer
from spectral_fairseq.provenance import resolve_user_dir
from tests.checkpoints.made import cone, entries, save, with_padding
from tests.new_process import run_commands

PACKAGE = Path(spectral_fairseq.__file__).resolve().parent


def run(*arguments):
    return main(["doctor", *arguments])


def test_text(capsys, monkeypatch):
    monkeypatch.setattr(float32_products, "timed_products", lambda: (70.2, 101.9))
    assert run() == 0
    text = capsys.readouterr().out
    assert text.rstrip() == doctor.as_text(doctor.diagnose())
    lines = text.splitlines()
    assert "  a thread: MKL 70 GFLOP/s, oneDNN 102" in lines
    assert lines[0] == "No problems found." and len(lines) <= 25 and max(map(len, lines)) <= 80
    assert run("--all") == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "No problems found."
    assert "fully_sharded" in text and "quant-noise" in text and "adaptive-input" in text
    words = " ".join(text.split())
    for one in compat.patch_fairseq() + trainer.patch_for_features():
        assert f"[{one.status.value}] {one.patch.name} {one.patch.reason} {one.detail}" in words
    assert max(map(len, text.splitlines())) <= 100


def test_a_version_that_was_not_tested_is_no_problem(monkeypatch):
    for version, said in (("2.14.1", "(tested:"), ("2.15.0", "(not tested,"), ("1.9", "(not")):
        assert doctor._tested("torch", version).startswith(f" {said}")
    assert doctor._tested("numpy", "2.4.6") == ""


def test_json(capsys):
    assert run("--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] and "0.12" in found["versions"]["fairseq"]
    names = {group: [one["name"] for one in all_] for group, all_ in found["patches"].items()}
    assert names == {
        "defects": [one.name for one in compat.PATCHES],
        "features": [one.name for one in trainer.PATCHES],
    }
    assert found["problems"] == []
    assert set(found["float32_products"]) == {"auto", "mkl", "onednn"}


def test_what_cannot_work_sets_the_exit_status(capsys, monkeypatch):
    broken = Applied(Patch("a name", "A defect.", str), Status.CANNOT, "a reason")
    monkeypatch.setattr(doctor, "patch_fairseq", lambda: [broken])
    assert run() == 1
    found = capsys.readouterr().out
    assert found.startswith("Something cannot work.") and "PROBLEM a name: a reason" in found


@pytest.mark.slow
def test_a_fairseq_that_cannot_be_imported(tmp_path):
    (tmp_path / "fairseq.py").write_text("raise ValueError('mutable default')")
    one = save(tmp_path / "checkpoint.pt", entries(with_padding(cone())))
    need_fairseq = (
        ("export", one, tmp_path / "out.pt"),
        ("evaluate-lm", one, tmp_path),
        ("analyze", one, "--data", tmp_path),
        ("flags",),
    )
    commands = (("doctor", "--format", "json"), *need_fairseq, ("analyze", one))
    doctors, *refused, analysed = run_commands(commands, tmp_path, "", tmp_path)
    assert doctors.returncode == 1
    (problem,) = json.loads(doctors.stdout)["problems"]
    assert "fairseq cannot be imported: ValueError: mutable default" in problem
    for done in refused:
        assert done.returncode == 2 and "spectral-fairseq doctor" in done.stderr
        assert "mutable default" in done.stderr and "Traceback" not in done.stderr
    assert analysed.returncode == 0  # it needs no fairseq


def test_user_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(PACKAGE.parent)
    assert resolve_user_dir("spectral_fairseq") == os.path.abspath("spectral_fairseq")
    assert doctor.diagnose()["user_dir"]["is_this_package"]
    (tmp_path / "spectral_fairseq").mkdir()
    monkeypatch.chdir(tmp_path)
    assert not doctor.diagnose()["user_dir"]["is_this_package"]
    assert f"give --user-dir {PACKAGE} instead" in doctor.as_text(doctor.diagnose())
    assert resolve_user_dir("no_such_user_dir") is None
