"""``spectral-fairseq flags``: all flags of the plugin, or those that contain a text."""

import re

from spectral_fairseq.commands.flags import flag_sections
from spectral_fairseq.commands.main import main


def test_every_flag_is_listed_with_its_meaning(capsys):
    assert main(["flags"]) == 0
    text = capsys.readouterr().out
    flags = [flag for section in flag_sections().values() for flag in section]
    assert re.findall(r"^  (--\S+)", text, re.M) == [flag.name for flag in flags]
    words = " ".join(text.split())
    assert all(" ".join(flag.meaning.replace("`", "").split()) in words for flag in flags)


def test_flags_that_contain_a_text(capsys):
    for text in ("Spectrum-C2", "spectrum_c2"):  # the latter is hydra's
        assert main(["flags", text]) == 0
        found = re.findall(r"^  (--\S+)", capsys.readouterr().out, re.M)
        assert found == ["--spectrum-c2", "--spectrum-c2"]  # of SVD tables, and of plain ones
    assert main(["flags", "no such flag"]) == 1
    assert capsys.readouterr().out == "No flag contains 'no such flag'.\n"
