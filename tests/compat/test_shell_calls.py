"""Programs that fairseq starts: none is chosen by a checkpoint or by the name of a folder."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path
from typing import List

import pytest

from spectral_fairseq.compat.data import FASTA_INDEX as PATCH
from tests.compat.fairseq_process import Failure, FairseqProcess
from tests.compat.test_literal_settings import calls

# Where fairseq starts programs, and why that is left as it is.
KNOWN = {
    "fairseq.data.fasta_dataset": "patched: see compat/data.py",
    "fairseq.data.plasma_utils": "plasma_store without a shell; its arguments are a size and a "
    "temporary file",
    "fairseq.distributed.utils": "scontrol without a shell, with SLURM's own list of hosts",
    "fairseq.tasks.audio_pretraining": "--post-save-script of fairseq-train, which takes its "
    "settings from the command line and never from a checkpoint",
}
POST_SAVE = any(name == "post_save" for _, _, name in calls())
if not POST_SAVE:  # fairseq 0.12.2
    del KNOWN["fairseq.tasks.audio_pretraining"]
if PATCH.unneeded() is not None:  # upstream from 2025-06 on
    del KNOWN["fairseq.data.fasta_dataset"]
indexes = pytest.mark.skipif(PATCH.unneeded() is not None, reason=str(PATCH.unneeded()))
STARTS = {"Popen", "call", "check_call", "check_output", "getoutput", "popen", "run", "system"}


def modules_that_start_programs() -> List[str]:
    return sorted(
        {
            module
            for module, node, name in calls()
            if name in STARTS
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id in ("os", "subprocess")
        }
    )


def test_all_places_are_known() -> None:
    assert modules_that_start_programs() == sorted(KNOWN)


@pytest.mark.skipif(not POST_SAVE, reason="this fairseq has no --post-save-script")
def test_the_script_after_saving_is_the_command_lines() -> None:
    """No other program calls it, and fairseq-train builds its task from its own arguments."""
    assert {module for module, _, name in calls() if name == "post_save"} == {"fairseq_cli.train"}
    builders = {module for module, _, name in calls() if name == "load_model_ensemble_and_task"}
    assert "fairseq_cli.train" not in builders and "fairseq_cli.validate" in builders


def index(path: str) -> List[List[int]]:
    from fairseq.data.fasta_dataset import FastaDataset

    dataset = FastaDataset(path)
    return [dataset.offsets.tolist(), dataset.sizes.tolist()]


def found_by(path: str) -> None:
    """Index a file, and fail unless all records were found."""
    from fairseq.data.fasta_dataset import FastaDataset

    assert len(FastaDataset(path)) == 3


RECORDS = ">first one\nACGT\nACG\n>second\nTT\n>third\nA\n"


@indexes
def test_the_name_of_a_folder_runs_nothing(
    bare: FairseqProcess, patched: FairseqProcess, tmp_path: Path
) -> None:
    expected = [[0, 20, 31], [7, 2, 1]]
    for name in ("plain", "$(touch executed)"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.fasta").write_text(RECORDS)
        assert patched.call(index, path=str(tmp_path / name / "train")) == expected
    assert not (patched.folder / "executed").exists()
    with pytest.raises(Failure):  # it opens a file of another name
        bare.call(found_by, path=str(tmp_path / "$(touch executed)" / "train"))
    assert (bare.folder / "executed").exists()


@indexes
def test_the_index_is_fairseqs(
    bare: FairseqProcess,
    patched: FairseqProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # fairseq's command runs tqdm, which is installed beside Python.
    path_of_programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path_of_programs)
    (tmp_path / "train.fasta").write_text(RECORDS)
    path = str(tmp_path / "train")
    assert bare.call(index, path=path) == patched.call(index, path=path)
