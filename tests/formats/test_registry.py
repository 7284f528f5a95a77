"""The documentation, the help and the refusal name every format of the registry."""

import re
from pathlib import Path

import pytest

from spectral_fairseq.commands.analyze import DESCRIPTION
from spectral_fairseq.errors import CheckpointError
from spectral_fairseq.formats import FOLDER, FORMATS, known
from spectral_fairseq.formats.opening import open_model

PAGE = Path(__file__).parents[2] / "docs" / "any_model.md"


def test_the_documentation_has_a_row_for_each_format():
    _, table = PAGE.read_text("utf-8").split("| given | read |\n|---|---|\n")
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", table.split("\n\n")[0], re.MULTILINE)
    assert rows == [(form.called, form.read_as) for form in (FOLDER, *FORMATS)]


def test_help_and_refusal_name_each_format(tmp_path):
    (tmp_path / "file").write_bytes(b"no model")
    with pytest.raises(CheckpointError) as refused:
        open_model(tmp_path / "file")
    for form in (FOLDER, *FORMATS):
        assert form.called in known()
    assert known() in DESCRIPTION and known() in refused.value.remedy
