"""Patches of how fairseq reads, writes and rebuilds checkpoints: safely, whole, and as saved."""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import os
import pickle
import re
import sys
import tempfile
import types
from argparse import Namespace
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence

import torch

from spectral_fairseq.checkpoints import reading
from spectral_fairseq.checkpoints.allowed import allowed_globals, restored
from spectral_fairseq.checkpoints.reading import (
    READ_FAILURES,
    explain_failure,
    not_fairseq,
    torch_load,
)
from spectral_fairseq.checkpoints.saved import checkpoint_file
from spectral_fairseq.checkpoints.settings import by_name, check_settings, literal
from spectral_fairseq.compat.patching import Overlay, Patch, replaces, wrapping
from spectral_fairseq.errors import (
    CheckpointError,
    ConfigurationError,
    SpectralFairseqError,
    misspelt,
)
from spectral_fairseq.files import replacing

# fairseq reads its own checkpoints, and never runs code from one, whatever the versions are.


# The modules that call torch.load; those of speech are not imported by every fairseq.
_LOADERS = (
    "fairseq.checkpoint_utils",
    "fairseq.data.codedataset",
    "fairseq.models.speech_to_text.xm_transformer",
    "fairseq.models.text_to_speech.vocoder",
)
_BROADCAST = "fairseq.distributed.utils"  # calls it on what a worker has sent


def with_safe_load(torch_module: types.ModuleType) -> Overlay:
    """An overlay of torch whose ``load`` takes only the allow-list, and settings that are data.

    See Note [A module of their own] in ``patching.py``.
    """
    restricted = with_restricted_load(torch_module)

    def load(f: Any, *args: Any, **options: Any) -> Any:
        loaded = restricted.load(f, *args, **options)
        if isinstance(loaded, dict) and "model" in loaded:
            check_settings(loaded, getattr(f, "name", f))  # before fairseq looks at it
        return loaded

    return Overlay(torch_module, load=load)


def with_restricted_load(torch_module: types.ModuleType) -> Overlay:
    """An overlay of torch whose ``load`` takes only the allow-list, whatever its caller asks for.

    It is for what one worker sends to others: a checkpoint that it has checked when it read it, and
    in which placeholders stand for tensors that follow.
    """

    def load(
        f: Any,
        map_location: Any = None,
        pickle_module: Any = None,  # noqa: ARG001  (the reader of this package is taken)
        *,
        weights_only: Any = None,  # noqa: ARG001  (always on)
        **options: Any,
    ) -> Any:
        loaded = torch_load(f, map_location=map_location, **options)
        return restored(loaded, getattr(f, "name", f))

    return Overlay(torch_module, load=load)


def _install_safe_loading() -> str:
    changed = replaces(
        {
            **{f"{name}:torch": with_safe_load for name in _LOADERS if name in sys.modules},
            f"{_BROADCAST}:torch": with_restricted_load,
        }
    )()
    if hasattr(torch.serialization, "add_safe_globals"):  # for plugins that call torch.load
        torch.serialization.add_safe_globals(list(allowed_globals()))
    if _takes(_Foreign()) or not _takes(argparse.Namespace()):
        raise RuntimeError("it loads checkpoints in a way that is not known here")
    return f"{len(allowed_globals())} names are allowed, all others refused; {changed}"


class _Foreign:
    """An object outside the allow-list: loading it calls a function, which does nothing."""

    def __reduce__(self) -> Any:
        return _rebuild_foreign, ()


def _rebuild_foreign() -> None:
    return None


def _takes(value: Any) -> bool:
    """Whether fairseq's loader takes a checkpoint with this value in it."""
    from fairseq import checkpoint_utils

    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}}
    checkpoint = {
        "args": None,
        "cfg": None,
        "model": {},
        "optimizer_history": [{**history, "num_updates": 0}],
        "extra_state": {"train_iterator": {"epoch": 1}},
        "probe": value,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.pt"
        torch.save(checkpoint, path)
        try:
            checkpoint_utils.load_checkpoint_to_cpu(str(path))
        except (pickle.UnpicklingError, CheckpointError):
            return False
    return True


SAFE_LOADING = Patch(
    name="safe loading",
    reason="Depending on the versions, fairseq's loader refuses the plain settings in its own "
    "checkpoints (torch >= 2.6), or runs whatever code a file holds (older torch, and fairseq of "
    "2025-09, which asks for weights_only=False).",
    install=_install_safe_loading,
)


# No string of a setting is run as code: fairseq's ``eval`` takes literals only.
#
# Note [A global named eval]
# --------------------------
# fairseq calls ``eval`` on settings in about twenty modules, many of them while it builds a model,
# so that the settings of a checkpoint would run code. A name is looked up among the globals of its
# module before the builtins. So each module of fairseq gets a global ``eval``, those that are
# loaded now and, by a finder on ``sys.meta_path``, those that will be. Python's own ``eval`` stays
# as it is.


PACKAGES = ("fairseq", "fairseq_cli")


def _modules() -> Iterator[types.ModuleType]:
    """The modules of fairseq that are loaded, also one that runs as the main program."""
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)  # python -m fairseq_cli.train is __main__
        if (spec.name if spec is not None else name).partition(".")[0] in PACKAGES:
            yield module


class _LiteralEval(MetaPathFinder):
    """Finds modules of fairseq as the other finders do, and gives each its global ``eval``."""

    def find_spec(
        self,
        fullname: str,
        path: Optional[Sequence[str]],
        target: Optional[types.ModuleType] = None,
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        others = (finder for finder in sys.meta_path if not isinstance(finder, _LiteralEval))
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _give_eval_before_running(spec.loader)
        return spec


def _give_eval_before_running(loader: Any) -> None:
    run = loader.exec_module

    def exec_module(module: types.ModuleType) -> None:
        module.__dict__["eval"] = literal
        run(module)

    loader.exec_module = exec_module


def _install_literal_settings() -> str:
    for module in _modules():
        module.__dict__["eval"] = literal
    if not any(isinstance(finder, _LiteralEval) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LiteralEval())
    from fairseq import utils

    try:
        utils.eval_str_list("[len('')]")
    except ConfigurationError:
        return f"eval takes literals only, in all modules of {' and '.join(PACKAGES)}"
    raise RuntimeError("it evaluates settings in a way that is not known here")


LITERAL_SETTINGS = Patch(
    name="literal settings",
    reason="fairseq evaluates strings of its settings as Python code, also those that a checkpoint "
    "brings, so that building a model from a checkpoint would run its author's code.",
    install=_install_literal_settings,
)


DEAD = (
    "in_proj_weight",
    "in_proj_bias",
    "out_proj_weight",
    "out_proj_bias",
    "fc1_weight",
    "fc1_bias",
    "fc2_weight",
    "fc2_bias",
)


def _unneeded() -> Optional[str]:
    from fairseq.modules.transformer_layer import TransformerEncoderLayerBase

    has_them = "_load_from_state_dict" in vars(TransformerEncoderLayerBase)
    return "this fairseq has these parameters itself" if has_them else None


@wrapping
def drop_dead_keys(
    self: Any, state_dict: Dict[str, Any], name: str, *, original: Callable[..., None]
) -> None:
    """Wrap an encoder layer's ``upgrade_state_dict_named``.

    The keys of all layers of the same stack are dropped at once: with --encoder-layers-to-keep
    the checkpoint has more layers than the model.
    """
    stack = re.escape(name.rpartition(".")[0])
    dead = re.compile(rf"{stack}\.\d+\.({'|'.join(DEAD)})")
    for key in [key for key in state_dict if dead.fullmatch(key)]:
        del state_dict[key]
    original(self, state_dict, name)


DEAD_ENCODER_KEYS = Patch(
    name="dead encoder keys",
    reason="Checkpoints of fairseq 0.12.2 hold eight unused tensors for each encoder layer (copies "
    "for a fast path), which other versions refuse as unexpected keys.",
    install=replaces(
        {
            "fairseq.modules.transformer_layer:TransformerEncoderLayerBase"
            ".upgrade_state_dict_named": drop_dead_keys
        }
    ),
    unneeded=_unneeded,
)


@wrapping
def atomic(
    src_path: str, dst_path: str, overwrite: bool = False, *, original: Callable[..., Any]
) -> Any:
    """Wrap ``PathManager.copy`` so that its target is either the old file or the whole new one."""
    from fairseq.file_io import PathManager

    is_remote = PathManager.path_requires_pathmanager(dst_path)  # such stores cannot rename
    if is_remote or (os.path.exists(dst_path) and not overwrite):
        return original(src_path, dst_path, overwrite=overwrite)
    with replacing(dst_path) as partial:
        return original(src_path, str(partial), overwrite=True)


ATOMIC_COPY = Patch(
    name="atomic copy",
    reason="checkpoint_best.pt and checkpoint_last.pt are overwritten in place by a copy: training "
    "killed at that moment leaves a truncated file where a good one was.",
    install=replaces({"fairseq.file_io:PathManager.copy": atomic}),
)


# A checkpoint that fairseq cannot read ends in an error that names the file and the remedy.
#
# This patch mostly changes error messages. It is worth its lines because a truncated checkpoint is
# what a full disk or a killed copy leaves, on the day when the run has to be resumed: the user
# needs to learn that another checkpoint of the run will do. It also keeps fairseq from waiting for
# a pipe and from inflating an archive of zeros.


@wrapping
def explain(
    path: str, *args: Any, original: Callable[..., Dict[str, Any]], **kwargs: Any
) -> Dict[str, Any]:
    """Wrap fairseq's loader so that it raises :class:`CheckpointError`.

    Missing and forbidden files keep the system's error, which names them.
    """
    try:
        if os.path.exists(path):  # else a remote path, or an error of fairseq's own
            file = checkpoint_file(path)
            members = reading.entries(file)
            reading.check_archive_sizes(members, file)
            reading.check_one_archive(members, file)
        state = original(path, *args, **kwargs)
    except (SpectralFairseqError, FileNotFoundError, PermissionError):
        raise
    except KeyError as error:
        # A dictionary without the entries that fairseq upgrades old checkpoints from.
        raise not_fairseq(path, {"... (no entry " + str(error) + ")": None}) from error
    except READ_FAILURES as error:
        if not os.path.isfile(path):  # a remote path: fairseq's own error says more
            raise
        raise explain_failure(path, error) from error
    return state


DAMAGED_CHECKPOINT = Patch(
    name="damaged checkpoint",
    reason="A truncated, damaged or foreign checkpoint fails with torch's internal error, which "
    "names neither the file nor what to do.",
    install=replaces({"fairseq.checkpoint_utils:load_checkpoint_to_cpu": explain}),
)


# A checkpoint needs no file of word vectors: it has its own vectors.
#
# With ``--encoder-embed-path`` fairseq reads the file again whenever it builds the model of a
# checkpoint, only to overwrite its vectors with those of the checkpoint. So a checkpoint cannot be
# loaded where the file is missing.


# Settings that name files of initial word vectors, which training replaces by its own.
EMBEDDING_FILES = ("encoder_embed_path", "decoder_embed_path")


@wrapping
def forget_files(
    path: str, *args: Any, original: Callable[..., Any], **kwargs: Any
) -> Dict[str, Any]:
    """Wrap ``load_checkpoint_to_cpu`` so that a model is built without the file of its vectors."""
    state: Dict[str, Any] = original(path, *args, **kwargs)
    nodes = [state.get("args"), (state.get("cfg") or {}).get("model")]
    for settings in nodes:
        values = by_name(settings)
        for name in EMBEDDING_FILES:
            if values is not None and name in values and values[name] is not None:
                values[name] = None
    return state


EMBEDDING_FILE = Patch(
    name="embedding file",
    reason="A checkpoint cannot be loaded where the file of word vectors that it was trained from "
    "is missing.",
    install=replaces({"fairseq.checkpoint_utils:load_checkpoint_to_cpu": forget_files}),
)


# A model that keeps some layers of another can be trained, saved and loaded (LayerDrop).
#
# Fan, Grave, Joulin: "Reducing Transformer Depth on Demand with Structured Dropout", ICLR 2020,
# https://arxiv.org/abs/1909.11556. With ``--encoder-layers-to-keep 0,2`` fairseq builds two layers
# and takes their weights from layers 0 and 2 of the checkpoint that it loads. Four things go wrong:
#
# - The flag of ``transformer`` is declared as a list, and the models read a text.
# - The number of layers is written into a copy of the settings, so that a checkpoint of the smaller
#   model, which no longer says which layers to keep, still says that it has all of them.
# - A smaller model is cut once more when its own training is resumed.
# - Where one side alone is cut, the other loses all its layers.


_SIDES = ("encoder", "decoder")


def _layers(state_dict: Mapping[str, Any], side: str) -> List[int]:
    """The numbers of the layers whose weights are there, by the pattern of fairseq."""
    matches = (re.match(rf"{side}.*\.layers\.(\d+)\.", key) for key in state_dict)
    return sorted({int(match[1]) for match in matches if match})


def _kept(settings: Any, side: str) -> Optional[List[int]]:
    """The layers to keep in ascending order; None stands for all."""
    values = by_name(settings)
    name = f"{side}_layers_to_keep"
    setting = values[name] if name in values else None  # omegaconf 2.0 has no default here
    if setting is None or setting == "":
        return None
    try:
        kept = sorted(int(number) for number in str(setting).strip("[]").split(","))
    except ValueError:
        kept = []
    if not kept or kept[0] < 0 or len(set(kept)) < len(kept):
        flag = f"--{name.replace('_', '-')}"
        raise misspelt(f"{flag} to be different numbers of layers from 0, such as 0,2", setting)
    return kept


def _say_what_is_kept(settings: Any, side: str, number: int) -> None:
    """Make the settings those of a model that has ``number`` layers and keeps all of them."""
    values = by_name(settings)
    from omegaconf import OmegaConf, open_dict  # doctor reads this file without fairseq

    with open_dict(values) if OmegaConf.is_config(values) else contextlib.nullcontext():
        values[f"{side}_layers"] = number
        values[f"{side}_layers_to_keep"] = None


@wrapping
def pruning_once(
    state_dict: Dict[str, Any], model_cfg: Any, *, original: Callable[..., Any]
) -> Dict[str, Any]:
    """Wrap ``prune_state_dict``, which every model calls on the weights that it loads."""
    kept = {} if model_cfg is None else {side: _kept(model_cfg, side) for side in _SIDES}
    pruning = {}
    for side, layers in kept.items():
        there = _layers(state_dict, side)
        if layers is None or len(there) == len(layers):  # as many as the model has
            pruning[side] = there
            continue
        absent = sorted(set(layers) - set(there))
        if absent:
            wanted = (
                f"--{side}-layers-to-keep to name some of {len(there)} layers of the checkpoint"
            )
            raise ConfigurationError(wanted, f"layer {absent[0]}", "Count them from 0.")
        pruning[side] = layers
    if any(kept.values()):
        names = {f"{side}_layers_to_keep": ",".join(map(str, pruning[side])) for side in kept}
        state_dict = original(state_dict, Namespace(arch="", **names))
    for side, layers in kept.items():
        if layers is not None:
            _say_what_is_kept(model_cfg, side, len(layers))
    return state_dict


@wrapping
def saying_what_is_kept(self: Any, *, original: Callable[[Any], Dict[str, Any]]) -> Dict[str, Any]:
    """Wrap ``Trainer.state_dict``: a model that was trained anew with the flag loads no weights."""
    state = original(self)
    settings = state["cfg"]["model"]
    for side in _SIDES:
        kept = _kept(settings, side)
        if kept is not None and len(_layers(state["model"], side)) == len(kept):
            _say_what_is_kept(settings, side, len(kept))
    return state


def _install_kept_layers() -> str:
    from fairseq.models.transformer.transformer_config import DecoderConfig, EncDecBaseConfig

    for config in (EncDecBaseConfig, DecoderConfig):
        config.__dataclass_fields__["layers_to_keep"].type = Optional[str]
    return (
        "declares layers_to_keep as a text, and "
        + replaces(
            {
                "fairseq.checkpoint_utils:prune_state_dict": pruning_once,
                "fairseq.trainer:Trainer.state_dict": saying_what_is_kept,
            }
        )()
    )


KEPT_LAYERS = Patch(
    name="kept layers",
    reason="A training with --encoder-layers-to-keep or --decoder-layers-to-keep fails at its "
    "start, or saves checkpoints that nothing can load.",
    install=_install_kept_layers,
)
