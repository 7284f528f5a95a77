"""The presets for fairseq-hydra-train say what the recipes' flags say."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from spectral_fairseq.plugin.criterions.unset import FACTORED

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
if not EXAMPLES.exists():
    pytest.skip("the examples are not beside these tests", allow_module_level=True)
NODES = ("optimizer", "lr_scheduler", "optimization", "dataset", "checkpoint", "criterion")


def recipe(folder, function, name):
    """The configuration that a README's shell function makes of the line that calls it."""
    text = (EXAMPLES / folder / "README.md").read_text("utf-8").replace("\\\n", "")
    body = re.search(rf"^{function}\(\) {{.*?\n(.*?)^}}", text, re.S | re.M).group(1)
    own = re.search(rf"^{function} {name} (.*)$", text, re.M).group(1)
    flags = shlex.split(body)[1:-1] + shlex.split(own)
    flags = [flag for flag in flags if flag != "--fp16"]
    flags[flags.index("--save-dir") + 1] = "checkpoints"
    parsed = options.parse_args_and_arch(options.get_training_parser(), flags)
    return convert_namespace_to_omegaconf(parsed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset, folder, function, name",
    [
        ("translation_sc", "translation_iwslt14_de_en", "train", "sc"),
        ("translation_cosreg", "translation_iwslt14_de_en", "train", "cosreg"),
        ("translation_weight_norm", "translation_iwslt14_de_en", "train", "weight_norm"),
        ("translation_mos", "translation_iwslt14_de_en", "train", "mos"),
        ("awd_lstm_wt2", "lm_wikitext2", "awd", "plain"),
        ("awd_lstm_wt2_sc", "lm_wikitext2", "awd", "sc"),
        ("awd_lstm_mos_wt2", "lm_wikitext2", "mos", "mos"),
        ("awd_lstm_mos_ptb_weight_norm", "lm_ptb", "mos", "mos_weight_norm"),
    ],
)
def test_a_preset_says_what_its_recipe_says(preset, folder, function, name):
    written = yaml.safe_load((EXAMPLES / "hydra" / f"{preset}.yaml").read_text("utf-8"))
    wanted = recipe(folder, function, name)
    for node in NODES:
        for key, value in written[node].items():
            given = wanted[node][key]
            # Left to the kind of table, which is an SVD table in every recipe that has a preset.
            asked = FACTORED.get(key) if given is None else given
            assert str(asked) == str(value), f"{node}.{key}"
    assert written["common"]["seed"] == wanted.common.seed
    for key in ("keep_last_epochs", "no_epoch_checkpoints"):
        default = {"keep_last_epochs": -1, "no_epoch_checkpoints": False}[key]
        assert written["checkpoint"].get(key, default) == wanted.checkpoint[key]
