"""Export a checkpoint to one that fairseq loads without this package, and that to CTranslate2.

Note [Flags of an exported Transformer]
---------------------------------------
fairseq's own ``transformer`` checkpoints keep the model's flags, together with the task's, in an
``argparse.Namespace``, which ``torch.load(weights_only=True)`` refuses. Here they are a plain dict,
and so is a Namespace elsewhere in the original checkpoint, as some multilingual tasks have it. It
has to be a ``dict`` itself: of any subclass omegaconf makes one opaque value, whose flags
``--model-overrides`` does not reach.
"""

from __future__ import annotations

import dataclasses
import warnings
from argparse import Namespace
from typing import Any, Dict, Mapping, Tuple

from fairseq import checkpoint_utils, models
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig

from spectral_fairseq.checkpoints.collapse import collapse_tables
from spectral_fairseq.checkpoints.settings import by_name, check_settings, name_in
from spectral_fairseq.commands.logit_check import LogitCheck, compare_logits
from spectral_fairseq.compat.embedding_file import EMBEDDING_FILES
from spectral_fairseq.errors import (
    CheckpointError,
    NoEquivalentError,
    NotFairseqError,
    first_line,
)
from spectral_fairseq.options import flag_of
from spectral_fairseq.plugin.criterion import PenalisedCrossEntropy
from spectral_fairseq.plugin.flat_transformer import FlatTransformerConfig
from spectral_fairseq.plugin.transformer import SpectralTransformer
from spectral_fairseq.plugin.transformer_lm import SpectralTransformerLM


def with_configuration(checkpoint: Dict[str, Any], path: Any) -> Dict[str, Any]:
    """A checkpoint of a fairseq before 0.10, with the configuration that its flags make.

    Others are returned as they are.

    Args:
        checkpoint: that was read; its flags may be changed.
        path: of it, for messages.

    Raises:
        CheckpointError: flags of which fairseq makes no configuration.
    """
    if checkpoint.get("cfg") or checkpoint.get("args") is None:
        return checkpoint
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hydra's about how fairseq calls it
            upgraded: Dict[str, Any] = checkpoint_utils._upgrade_state_dict(dict(checkpoint))
    except Exception as error:  # a file's flags may be anything
        wanted = f"flags of which fairseq can make a configuration in {path}"
        raise NotFairseqError(wanted, first_line(error)) from error
    check_settings(upgraded, path)
    return upgraded


def export_checkpoint(checkpoint: Mapping[str, Any]) -> Tuple[Dict[str, Any], LogitCheck]:
    """Return the plain checkpoint that computes the same logits as ``checkpoint``.

    It has neither the state of the optimiser, which belongs to the factors, nor the progress of
    the training: ``--finetune-from-model`` and ``--restore-file`` start a new training from the
    exported weights. A checkpoint that is plain already is only saved anew: fairseq alone refuses
    its own files under torch >= 2.6, since they hold objects that may execute code.

    Returns:
        The new checkpoint, and how far its logits are from the original's.
    """
    plain, _ = plain_form(checkpoint)
    return plain, compare_logits(checkpoint, plain)


def plain_checkpoint(checkpoint: Mapping[str, Any]) -> Dict[str, Any]:
    """The same for converters, which compare the logits themselves where nothing is collapsed.

    Raises:
        UnsupportedError: the model writes fewer words than it reads, for which other formats have
            no second vocabulary.
    """
    plain, needed = plain_form(checkpoint)
    if needed:
        compare_logits(checkpoint, plain)
    read, written = (
        len(plain["model"].get(f"decoder.{name}.weight", ()))
        for name in ("embed_tokens", "output_projection")
    )
    if written and written != read:
        raise NoEquivalentError(
            "a model that writes all words that it reads",
            f"one that reads {read} and writes {written} (--output-dictionary-size)",
            _FAIRSEQ_ALONE,
        )
    return plain


def plain_form(checkpoint: Mapping[str, Any]) -> Tuple[Dict[str, Any], bool]:
    """The plain checkpoint, and whether the model of ``checkpoint`` needs this package."""
    cfg = checkpoint.get("cfg") or {}
    _require_node(cfg, "model")
    _refuse_other_heads(cfg)
    plain_arch, needed = _plain_arch(cfg)
    _require_node(cfg, "task")
    plain = {
        "args": None,
        "cfg": _plain_cfg(cfg, plain_arch),
        "model": collapse_tables(checkpoint["model"]),
        "criterion": None,
        "optimizer_history": _plain_history(checkpoint),
        "task_state": checkpoint.get("task_state", {}),
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
    }
    return plain, needed


def _require_node(cfg: Mapping[str, Any], name: str) -> None:
    if not cfg.get(name):
        raise NotFairseqError(f"a checkpoint with its configuration (cfg.{name})", "none")


# What no other format has; or what cannot be built without data.
_OF_FAIRSEQ_ALONE = (
    "adaptive_input",
    "adaptive_softmax_cutoff",
    "character_embeddings",
    "char_inputs",
    "cross_self_attention",
    "no_cross_attention",
)
_FAIRSEQ_ALONE = "Try --to fairseq, or keep this checkpoint and use fairseq."


def check_known_elsewhere(checkpoint: Mapping[str, Any], wanted: str) -> None:
    """Refuse a model of a kind that only fairseq has.

    Args:
        checkpoint: of the model.
        wanted: what the other format can represent.

    Raises:
        UnsupportedError: it is no Transformer, or its flags name such a kind; another format than
            fairseq's is no remedy.
    """
    cfg = checkpoint.get("cfg") or {}
    _require_node(cfg, "model")
    _plain_arch(cfg)  # others, such as LSTMs, have some of these flags by default
    flags = by_name(cfg["model"])
    found = [flag_of(name) for name in _OF_FAIRSEQ_ALONE if flags.get(name)]
    if found:
        raise NoEquivalentError(wanted, f"one with {' and '.join(found)}", _FAIRSEQ_ALONE)


def _refuse_other_heads(cfg: Mapping[str, Any]) -> None:
    flags = by_name(cfg["model"])
    head, softcap = flags.get("output_head", "softmax"), flags.get("logit_softcap")
    if head != "softmax" or softcap is not None:
        cap = "" if softcap is None else f" --logit-softcap {softcap:g}"
        raise NoEquivalentError(
            "a model with one softmax and scores without a cap",
            f"--output-head {head}{cap}",
            "Use this checkpoint and --user-dir; or translate the training source with it and "
            "train a plain arch on the result (sequence-level distillation).",
        )


def _plain_arch(cfg: Mapping[str, Any]) -> Tuple[str, bool]:
    arch = name_in(by_name(cfg["model"]), "arch")
    built_by = models.ARCH_MODEL_REGISTRY.get(arch, models.MODEL_REGISTRY.get(arch))
    if built_by is None:
        remedy = "Check that this version of the package knows the architecture."
        raise CheckpointError("the checkpoint of a registered architecture", repr(arch), remedy)
    if issubclass(built_by, SpectralTransformer):
        return "transformer", True
    if issubclass(built_by, SpectralTransformerLM):
        return "transformer_lm", True
    if built_by in (TransformerModel, TransformerLanguageModel):
        return ("transformer" if built_by is TransformerModel else "transformer_lm"), False
    wanted = "an architecture with an equivalent among fairseq's plain Transformers"
    raise NoEquivalentError(wanted, repr(arch), "Keep this checkpoint and use fairseq.")


def _plain_cfg(cfg: Mapping[str, Any], plain_arch: str) -> Dict[str, Any]:
    plain = {
        name: dict(vars(node)) if isinstance(node, Namespace) else node
        for name, node in cfg.items()
    }
    plain["common"] = {**by_name(cfg.get("common") or {}), "user_dir": None}
    plain["criterion"] = _plain_criterion(cfg.get("criterion"))
    plain["model"] = _plain_flags(cfg, plain_arch)
    return plain


def _plain_flags(cfg: Mapping[str, Any], plain_arch: str) -> Dict[str, Any]:
    is_lm = plain_arch == "transformer_lm"
    known = dataclasses.fields(TransformerLanguageModelConfig if is_lm else FlatTransformerConfig)
    settings = by_name(cfg["model"])
    flags = {field.name: settings[field.name] for field in known if field.name in settings}
    flags.update({name: None for name in EMBEDDING_FILES if name in flags})
    flags["_name"] = plain_arch
    if is_lm:
        return flags
    task = by_name(cfg["task"])
    names = {"task": name_in(task, "task"), "arch": plain_arch}
    return {**task, **flags, **names}


def _plain_criterion(node: Any) -> Any:
    criterion = isinstance(node, dict) and CRITERION_REGISTRY.get(node.get("_name"))
    if not (criterion and issubclass(criterion, PenalisedCrossEntropy)):
        return node
    of_smoothed = ("label_smoothing", "report_accuracy", "ignore_prefix_size")
    is_smoothed = any(node.get(name) for name in of_smoothed)
    names = ("sentence_avg", *(of_smoothed if is_smoothed else ()))
    return {
        "_name": "label_smoothed_cross_entropy" if is_smoothed else "cross_entropy",
        **{name: node[name] for name in names if name in node},
    }


def _plain_history(checkpoint: Mapping[str, Any]) -> Any:
    # fairseq asks for one entry, and tells the model its number of updates; the names of classes
    # are compared only when an optimiser state is there.
    last = (checkpoint.get("optimizer_history") or [{}])[-1] or {}
    return [
        {
            "criterion_name": "",
            "optimizer_name": "",
            "lr_scheduler_state": {},
            "num_updates": last.get("num_updates") or 0,
        }
    ]
