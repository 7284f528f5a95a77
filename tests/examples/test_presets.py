"""The presets for fairseq-hydra-train say what the recipes' flags say."""

import re
import shlex
from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from fairseq import options
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY
from fairseq.dataclass.configs import CheckpointConfig, DatasetConfig, OptimizationConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.optim import OPTIMIZER_DATACLASS_REGISTRY
from fairseq.optim.lr_scheduler import LR_SCHEDULER_DATACLASS_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf import OmegaConf

from spectral_fairseq.plugin.spectrum_control import FACTOR_PENALTIES

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
if not EXAMPLES.exists():
    pytest.skip("the examples are not beside these tests", allow_module_level=True)
NODES = (
    *("model", "task", "criterion", "optimizer", "lr_scheduler", "optimization", "dataset"),
    "checkpoint",
)
OF_THE_PLACE = {("task", "data"), ("checkpoint", "save_dir")}


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
@pytest.mark.parametrize("preset, folder, function, name", [
    ("translation_sc", "translation_iwslt14_de_en", "train", "sc"),
    ("translation_cosreg", "translation_iwslt14_de_en", "train", "cosreg"),
    ("translation_weight_norm", "translation_iwslt14_de_en", "train", "weight_norm"),
    (
        *("translation_weight_norm_init", "translation_iwslt14_de_en"),
        *("train", "weight_norm_init_decay"),
    ),
    ("translation_mos", "translation_iwslt14_de_en", "train", "mos"),
    ("awd_lstm_wt2", "lm_wikitext2", "awd", "plain"),
    ("awd_lstm_wt2_sc", "lm_wikitext2", "awd", "sc"),
    ("awd_lstm_mos_wt2", "lm_wikitext2", "mos", "mos"),
    ("awd_lstm_mos_ptb_weight_norm", "lm_ptb", "mos", "mos_weight_norm"),
])  # fmt: skip
def test_a_preset_says_what_its_recipe_says(preset, folder, function, name):
    written = yaml.safe_load((EXAMPLES / "hydra" / f"{preset}.yaml").read_text("utf-8"))
    wanted = recipe(folder, function, name)
    assert written["common"]["seed"] == wanted.common.seed
    different = {}
    for node in NODES:
        of_recipe, of_preset = wanted[node], complete(node, written.get(node, {}))
        if isinstance(of_recipe, Namespace):  # fairseq's own Transformer is no node of hydra
            of_recipe = vars(of_recipe)
            of_preset = {key: of_preset[key] for key in written[node] if key in of_recipe}
            del of_preset["_name"]
        for key, value in of_preset.items():
            asked = of_recipe.get(key)
            if (node, key) not in OF_THE_PLACE and not alike(key, value, asked):
                different[f"{node}.{key}"] = (value, asked)
    assert not different


def complete(node, written):
    """A node of a preset with the defaults of the dataclass behind it."""
    name = written.get("_name")
    config = {
        "model": lambda: MODEL_DATACLASS_REGISTRY[ARCH_MODEL_NAME_REGISTRY[name]],
        "task": lambda: TASK_DATACLASS_REGISTRY[name],
        "criterion": lambda: CRITERION_DATACLASS_REGISTRY[name],
        "optimizer": lambda: OPTIMIZER_DATACLASS_REGISTRY[name],
        "lr_scheduler": lambda: LR_SCHEDULER_DATACLASS_REGISTRY[name],
        "optimization": lambda: OptimizationConfig,
        "dataset": lambda: DatasetConfig,
        "checkpoint": lambda: CheckpointConfig,
    }[node]()
    defaults = OmegaConf.to_container(OmegaConf.structured(config), resolve=False)
    return {**defaults, **written}


def alike(key, value, asked):
    """Whether two settings mean the same, such as 0 and 0.0."""
    if isinstance(value, str) and value.startswith("${"):  # the value of another node
        return True
    # Left to the kind of table, which is an SVD table in every recipe that has a preset.
    asked = FACTOR_PENALTIES.get(key) if asked is None else asked
    value = FACTOR_PENALTIES.get(key) if value is None else value
    try:
        return float(value) == float(asked)
    except (TypeError, ValueError):
        return str(value) == str(asked)
