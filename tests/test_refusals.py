"""The table of refusals: each setting is found, nothing else is, and each entry is in use."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import spectral_fairseq
from spectral_fairseq import refusals
from spectral_fairseq.errors import UnsupportedError

PACKAGE = Path(spectral_fairseq.__file__).parent
NAMES = {value: name for name, value in vars(refusals).items() if value in refusals.REFUSALS}
SETTINGS = [(one, setting) for one in refusals.REFUSALS for setting in one.settings]
VALUES = (True, 2, "os", "slowmo", "fully_sharded", "composite", "nag", "sgd", "adamax")


def configuration(path, value):
    for name in reversed(path.split(".")):
        value = SimpleNamespace(**{name: value})
    return value


@pytest.mark.parametrize("refusal, setting", SETTINGS, ids=lambda one: NAMES.get(one, ""))
def test_a_setting_is_refused_by_its_flag(refusal, setting):
    flag, _, wanted = setting.flag.partition(" ")
    value = wanted or next(value for value in VALUES if setting.refused(value))
    with pytest.raises(UnsupportedError, match=f"found {flag}") as caught:
        refusal.check(configuration(setting.path, value), "--ours")
    text = str(caught.value)
    assert "for --ours" in text and refusals.unquoted(refusal.remedy) in text
    assert "`" not in text and (value is True or str(value) in text)


@pytest.mark.parametrize("refusal, setting", SETTINGS, ids=lambda one: NAMES.get(one, ""))
def test_an_older_fairseq_and_other_values_are_no_reason(refusal, setting):
    refusal.check(SimpleNamespace())
    default = {"--optimizer": "adam", "--zero-sharding": "none", "--model-parallel-size": 1}
    value = default.get(setting.flag, "another" if " " in setting.flag else None)
    refusal.check(configuration(setting.path, value))


def test_every_entry_is_raised_somewhere():
    code = "".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))
    used = set(re.findall(r"refusals\.([A-Z_]+)\.", code))
    assert used | {"LABEL_SMOOTHING"} == set(NAMES.values())
    assert all(bool(one.settings or one.conflict) for one in refusals.REFUSALS)
