"""Tasks of fairseq for which an architecture of this package is not made."""

from argparse import Namespace

import fairseq.models
import pytest
from fairseq.tasks import TASK_REGISTRY
from omegaconf import OmegaConf

from spectral_fairseq import refusals
from spectral_fairseq.errors import UnsupportedError
from spectral_fairseq.plugin.other_tasks import check_task

LANGUAGE_MODELS = (
    "transformer_lm_sc",
    "transformer_lm_mos",
    "awd_lstm_ptb",
    "transformer_xl_wt103",
)
PLAIN = {"embedding_type": "plain", "output_head": "softmax", "logit_softcap": None}
CASES = [
    *(
        (refusals.SEVERAL_MODELS, task, arch, {})
        for task in ("multilingual_translation", "semisupervised_translation")
        for arch in ("transformer_sc", "lstm_mos", "awd_lstm_ptb")
    ),
    *(
        (refusals.NEW_ROWS, "online_backtranslation", "transformer_sc", {**PLAIN, **flags})
        for flags in ({"embedding_type": "svd"}, {"output_head": "moc"}, {"logit_softcap": 3.0})
    ),
    *(
        (refusals.LANGUAGE_MODEL, task, arch, {})
        for task in ("translation", "translation_lev", "translation_multi_simple_epoch")
        for arch in LANGUAGE_MODELS
    ),
]


def task_of(name):
    return object.__new__(TASK_REGISTRY[name])


@pytest.mark.parametrize("refusal, task, arch, flags", CASES)
def test_it_is_refused_with_its_name(refusal, task, arch, flags):
    """Before a setting is asked for that only other models have, in training and from a file."""
    one = task_of(task)
    for settings in (OmegaConf.create({"_name": arch, **flags}), Namespace(arch=arch, **flags)):
        for build in (lambda given: fairseq.models.build_model(given, one), one.build_model):
            with pytest.raises(UnsupportedError) as caught:
                build(settings)
            assert caught.value.found == f"--task {task} with --arch {arch}"
            assert caught.value.remedy == refusals.unquoted(refusal.remedy)


@pytest.mark.parametrize("task, arch", [
    ("multilingual_translation", "multilingual_transformer"), ("translation", "transformer_lm"),
    ("translation", "transformer_sc"), ("translation_multi_simple_epoch", "transformer_mos"),
    ("language_modeling", "awd_lstm_ptb"), ("stateful_language_modeling", "awd_lstm_ptb"),
    ("online_backtranslation", "transformer"), ("online_backtranslation", "transformer_sc"),
    ("translation", "of_no_plugin"), ("translation", None),
])  # fmt: skip
def test_what_works_and_what_is_fairseq_s_is_left_alone(task, arch):
    check_task(task_of(task), Namespace(arch=arch, **PLAIN))


def test_a_task_of_another_plugin_may_take_what_its_base_class_may_not():
    own = type(
        "DecoderOnlyTask", (TASK_REGISTRY["translation"],), {"__module__": "of_a_plugin.task"}
    )
    check_task(object.__new__(own), Namespace(arch="transformer_lm_sc", **PLAIN))
