"""Refuses the architectures of this package in those tasks of fairseq that cannot train them.

Otherwise such a training ends in an error about an attribute or a setting, which names neither the
task nor the architecture.
"""

from __future__ import annotations

from typing import Any, Callable

from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY, FairseqLanguageModel
from fairseq.tasks import TASK_REGISTRY
from fairseq.tasks.multilingual_translation import MultilingualTranslationTask
from fairseq.tasks.online_backtranslation import OnlineBackTranslationTask
from fairseq.tasks.translation import TranslationTask
from fairseq.tasks.translation_multi_simple_epoch import TranslationMultiSimpleEpochTask

from spectral_fairseq import refusals
from spectral_fairseq.compat.patching import Patch, replaces, wrapping
from spectral_fairseq.plugin.table_and_head import has_own_output


def check_task(task: Any, settings: Any) -> None:
    """Refuse an architecture of this package that a task of fairseq cannot train.

    Args:
        task: the task that builds the model. One of another plugin may build it in its own way.
        settings: those of the model, which name its architecture.

    Raises:
        UnsupportedError: the task asks for another one.
    """
    arch = getattr(settings, "_name", None) or getattr(settings, "arch", None)
    model = ARCH_MODEL_REGISTRY.get(arch) or MODEL_REGISTRY.get(arch)
    if model is None or not model.__module__.startswith(f"{__package__}."):
        return
    if not type(task).__module__.startswith("fairseq."):
        return  # such as one that is derived from fairseq's and trains a decoder alone
    name = next((name for name, kind in TASK_REGISTRY.items() if kind is type(task)), type(task))
    found = f"--task {name} with --arch {arch}"
    if isinstance(task, MultilingualTranslationTask):
        raise refusals.SEVERAL_MODELS.error(found)
    language_model = issubclass(model, FairseqLanguageModel)
    if isinstance(task, (TranslationTask, TranslationMultiSimpleEpochTask)) and language_model:
        raise refusals.LANGUAGE_MODEL.error(found)
    if isinstance(task, OnlineBackTranslationTask) and has_own_output(settings):
        raise refusals.NEW_ROWS.error(found)


@wrapping
def _checking(
    settings: Any, task: Any, *args: Any, original: Callable[..., Any], **kwargs: Any
) -> Any:
    check_task(task, settings)
    return original(settings, task, *args, **kwargs)


@wrapping
def _checking_task(
    self: Any, settings: Any, *args: Any, original: Callable[..., Any], **kwargs: Any
) -> Any:
    check_task(self, settings)  # it reads settings that others lack before it builds a model
    return original(self, settings, *args, **kwargs)


MODELS_OF_TASKS = Patch(
    name="models of tasks",
    reason="Tasks for which a model of this package is not made are refused with the remedy.",
    install=replaces(
        {
            "fairseq.models:build_model": _checking,
            "fairseq.tasks.multilingual_translation:MultilingualTranslationTask.build_model": (
                _checking_task
            ),
        }
    ),
)
