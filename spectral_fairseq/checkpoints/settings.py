"""What every tool may rely on in the settings of a checkpoint that was read: types and literals.

A file that torch can read may still hold anything. It is checked once, here, so that the tools
need no checks of their own.
"""

from __future__ import annotations

import argparse
from numbers import Integral, Real
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple

import torch

from spectral_fairseq.checkpoints.literals import literal
from spectral_fairseq.errors import (
    ConfigurationError,
    NotFairseqError,
    UntrustedError,
)

MOST_SETTINGS = 100_000

# Settings that fairseq evaluates where they are strings, in whatever node they stand.
EVALUATED = frozenset(
    "adafactor_eps adam_betas adamax_betas adaptive_input_cutoff adaptive_softmax_cutoff "
    "character_filters conv_aggregator_layers conv_feature_layers decoder_attention decoder_layers "
    "downsample encoder_attention encoder_layers feature_encoder_spec gated_attention lamb_betas "
    "left_pad_source left_pad_target model_overrides override_encoder_layers pipeline_balance "
    "pipeline_decoder_balance pipeline_decoder_devices pipeline_devices pipeline_encoder_balance "
    "pipeline_encoder_devices pretrained project_input self_attention wer_args "
    "xformers_att_config".split()
)

# Those of fconv models, whose names are common ones: other models have paths and words there.
OF_FCONV = frozenset(
    "downsample encoder_attention gated_attention pretrained project_input self_attention".split()
)

_NODE = (Mapping, argparse.Namespace)
_NUMBER = (Real, torch.Tensor)

# What stands at each place of a checkpoint, unless nothing does; * is each entry of a list.
_TYPES: Tuple[Tuple[str, Any], ...] = (
    ("args", argparse.Namespace),
    ("args.arch", str),
    ("cfg", Mapping),
    *((f"cfg.{name}", _NODE) for name in ("common", "criterion", "model", "task")),
    *((f"cfg.{name}._name", str) for name in ("common", "criterion", "model", "task")),
    *((f"cfg.{name}.arch", str) for name in ("common", "criterion", "model", "task")),
    ("task_state", dict),
    ("last_optimizer_state", dict),
    ("last_optimizer_state.param_groups", list),
    ("optimizer_history", list),
    ("optimizer_history.*", dict),
    ("optimizer_history.*.num_updates", Integral),
    ("extra_state", dict),
    ("extra_state.best", _NUMBER),
    ("extra_state.val_loss", _NUMBER),
    ("extra_state.train_iterator", dict),
    ("extra_state.train_iterator.epoch", Integral),
    ("extra_state.train_iterator.iterations_in_epoch", Integral),
    ("extra_state.train_iterator.num_shards", Integral),
)
_NAMES = {
    dict: "a dictionary",
    Mapping: "a dictionary",
    argparse.Namespace: "an argparse.Namespace",
    Integral: "a whole number",
    list: "a list",
    Real: "a number",
    str: "a string",
    torch.Tensor: "a tensor",
}


def check_settings(state: Dict[str, Any], path: Any) -> None:
    """Check all of a checkpoint but its model.

    Args:
        state: the checkpoint as saved; entries may be missing. Containers of omegaconf, in which
            ``cfg`` may have been saved, are replaced by dictionaries.
        path: where it was read from, for messages.

    Raises:
        CheckpointError: an entry of another type than fairseq writes, or a setting that would run
            code when fairseq evaluates it.
    """
    cfg = _without_omegaconf(state.get("cfg"), "cfg", path)
    if isinstance(cfg, Mapping):
        cfg = {name: _without_omegaconf(node, f"cfg.{name}", path) for name, node in cfg.items()}
    if "cfg" in state:
        state["cfg"] = cfg
    for place, kind in _TYPES:
        for name, value in _values(state, place.split(".")):
            if value is not None and not isinstance(value, kind):
                kinds = kind if isinstance(kind, tuple) else (kind,)
                raise NotFairseqError(
                    f"{name} to be {' or '.join(map(_NAMES.__getitem__, kinds))} in {path}",
                    f"a value of type {type(value).__name__}",
                )
    names = EVALUATED if _may_be_fconv(state) else EVALUATED - OF_FCONV
    both = {name: state.get(name) for name in ("args", "cfg")}
    for where, name, text in each_setting(both, path):
        if name not in names or not isinstance(text, str) or text.strip() in ("", "???"):
            continue  # the last is omegaconf's: not set
        try:
            literal(text)
        except ConfigurationError as error:
            raise UntrustedError(
                f"{error.expected} as the setting {where}.{name} of {path}",
                f"{error.found}, which fairseq would run as code",
            ) from None


def _values(node: Any, names: Sequence[str], where: str = "") -> Iterator[Tuple[str, Any]]:
    """The values at a place of :data:`_TYPES` with their full names; None where there is none."""
    if not names:
        yield where, node
    elif names[0] == "*":
        for number, entry in enumerate(node or ()):
            yield from _values(entry, names[1:], f"{where}[{number}]")
    else:
        is_mapping = isinstance(node, Mapping)
        value = node.get(names[0]) if is_mapping else getattr(node, names[0], None)
        yield from _values(value, names[1:], f"{where}.{names[0]}".lstrip("."))


def _may_be_fconv(state: Mapping[str, Any]) -> bool:
    """Whether fairseq would build a model of the fconv family, as far as names tell."""
    model = by_name((state.get("cfg") or {}).get("model")) or {}
    archs = [getattr(state.get("args"), "arch", None), model.get("_name"), model.get("arch")]
    return any("fconv" in arch for arch in archs if arch is not None)


def _check_size(node: Any, name: str, path: Any) -> None:
    """Refuse containers that would become huge, as those do that hold one container often."""
    nodes, pending = 0, [node]
    while pending:
        nodes += 1
        if nodes > MOST_SETTINGS:
            raise NotFairseqError(f"at most {MOST_SETTINGS:,} settings as {name} of {path}", "more")
        content = getattr(pending.pop(), "__dict__", {}).get("_content")
        if isinstance(content, dict):
            pending.extend(content.values())
        elif isinstance(content, list):
            pending.extend(content)


def _without_omegaconf(node: Any, name: str, path: Any) -> Any:
    """``node`` as a dictionary or list if it is a container of omegaconf's.

    The containers resolve what is asked of them, and fail in many ways where a file has put other
    things into them. Their interpolations and missing values stay the strings that they are.
    """
    if not type(node).__module__.startswith("omegaconf."):
        return node
    from omegaconf import OmegaConf

    _check_size(node, name, path)
    try:
        return OmegaConf.to_container(node, resolve=False)
    except Exception as error:  # its attributes may be anything
        wanted = f"settings that omegaconf can read as {name} of {path}"
        raise NotFairseqError(wanted, f"{type(error).__name__}: {error}") from error


def each_setting(nodes: Mapping[str, Any], path: Any) -> Iterator[Tuple[str, Any, Any]]:
    """Place, name and value of every setting in nested nodes, of which each is read once."""
    pending: List[Tuple[str, Any]] = list(nodes.items())
    # By identity, since a node may contain itself; kept, so that no other gets its identity.
    seen: Dict[int, Any] = {}
    while pending:
        where, node = pending.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        node = _without_omegaconf(by_name(node), where, path)
        for name, value in node.items() if isinstance(node, Mapping) else ():
            yield where, name, value
            pending.append((f"{where}.{name}", value))


def by_name(node: Any) -> Any:
    """The settings of a node as a mapping, which is that of a Namespace itself and no copy."""
    return vars(node) if isinstance(node, argparse.Namespace) else node


def checkpoint_settings(checkpoint: Mapping[str, Any], node: str) -> Dict[str, Any]:
    """A node of a checkpoint's configuration as a dict, from ``cfg`` or an old ``args``.

    Its ``_name`` is what it chooses: the task, the arch, and so on.
    """
    cfg = checkpoint.get("cfg")
    stored = cfg.get(node) if isinstance(cfg, dict) else None
    if stored is None:
        stored = checkpoint.get("args") or {}
    settings = dict(stored) if isinstance(stored, dict) else dict(getattr(stored, "__dict__", {}))
    name = name_in(settings, "arch" if node == "model" else node)
    return settings if name is None else {**settings, "_name": name}


def name_in(settings: Mapping[str, Any], kind: str) -> Any:
    """What a checkpoint's settings choose: its task, arch or criterion; None if they do not say.

    Args:
        settings: a node of ``cfg``, which has the choice under ``_name``, or an old ``args``, which
            has it under the name of the flag.
        kind: the flag: ``task``, ``arch`` or ``criterion``.
    """
    return settings.get("_name") or settings.get(kind)


def data_folder_in(settings: Mapping[str, Any]) -> str:
    """The first folder of the training's data, by the settings of its task; empty if not said."""
    return str(settings.get("data") or "").split(":")[0]
