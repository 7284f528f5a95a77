"""Patches for what fairseq runs on: current torch and numpy, CPUs, and their launchers."""

from __future__ import annotations

import argparse
import atexit
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import queue
import sys
import threading
import types
import warnings
import weakref
from typing import Any, Callable, Dict, Optional, Tuple, Type

import numpy as np
import torch

from spectral_fairseq.compat.patching import Overlay, Patch, replaces, wrapping
from spectral_fairseq.errors import ConfigurationError, clashing_flags, needs_extra
from spectral_fairseq.provenance import torch_release

# Names that numpy has retired, given back to the few fairseq modules that still use them.
#
# See Note [A module of their own]: some libraries look for exactly these names in numpy itself, to
# tell numpy 1 from numpy 2.


_USES: Dict[str, Tuple[str, ...]] = {
    "fairseq.data.data_utils": ("int", "percentile"),
    "fairseq.data.token_block_dataset": ("compat",),
    "fairseq.data.language_pair_dataset": ("compat",),
    "fairseq.modules.dynamic_crf_layer": ("float",),
}


def _missing() -> Dict[str, Any]:
    """The names that the installed numpy lacks -> what fairseq means by them."""
    meant: Dict[str, Any] = {
        "int": int,
        "float": float,
        "compat": types.SimpleNamespace(long=int),
        "percentile": _percentile(np.percentile),
    }
    return {name: value for name, value in meant.items() if not _still_there(name)}


def _still_there(name: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == "percentile":
            try:
                np.percentile([0, 1], 50, interpolation="lower")  # type: ignore[call-overload]
            except TypeError:
                return False
            return True
        if name == "compat":
            return hasattr(np, "compat") and hasattr(np.compat, "long")
        return hasattr(np, name)


@wrapping
def _percentile(*args: Any, original: Callable[..., Any], **kwargs: Any) -> Any:
    if "interpolation" in kwargs:
        kwargs["method"] = kwargs.pop("interpolation")
    return original(*args, **kwargs)


def _unneeded_numpy_names() -> Optional[str]:
    return None if _missing() else f"numpy {np.__version__} has them all"


def _install_numpy_names() -> str:
    missing = _missing()

    def complete(numpy: types.ModuleType) -> Overlay:
        return Overlay(numpy, **missing)

    needy = [home for home, names in _USES.items() if missing.keys() & set(names)]
    return replaces({f"{home}:np": complete for home in needy})()


NUMPY_NAMES = Patch(
    name="numpy names",
    reason="fairseq uses np.compat.long, np.int, np.float and np.percentile(interpolation=), which "
    "newer numpy has removed (--sample-break-mode eos, fairseq-interactive, --num-batch-buckets).",
    install=_install_numpy_names,
    unneeded=_unneeded_numpy_names,
)


# Masks of spans draw whole numbers by the name that numpy's generators have.


def _unneeded_span_masks() -> Optional[str]:
    from fairseq.data.data_utils import compute_mask_indices

    # fairseq 0.12.2 draws from np.random itself, which has a randint.
    generators = "default_rng" in compute_mask_indices.__code__.co_names
    return None if generators else "this fairseq draws from numpy's global generator"


class _Generator(np.random.Generator):
    """numpy's generator, which also has the name that ``np.random`` has for whole numbers."""

    def randint(self, low: Any, high: Any = None, size: Any = None) -> Any:
        return self.integers(low, high, size)


def with_randint(numpy: types.ModuleType) -> Overlay:
    """An overlay of numpy whose ``default_rng`` draws the same numbers and has ``randint``."""

    def default_rng(seed: Any = None) -> np.random.Generator:
        return _Generator(np.random.default_rng(seed).bit_generator)

    return Overlay(numpy, random=Overlay(numpy.random, default_rng=default_rng))


SPAN_MASKS = Patch(
    name="span masks",
    reason="Masks of spans that do not overlap or are of random length (wav2vec and HuBERT: "
    "--no-mask-overlap, --mask-selection uniform) fail: 'Generator' has no attribute 'randint'.",
    install=replaces({"fairseq.data.data_utils:np": with_randint}),
    unneeded=_unneeded_span_masks,
)


# Encoders of fairseq 0.12.2 do not take their fast path, which newer versions of torch refuse.
#
# In evaluation they would call ``torch._transformer_encoder_layer_fwd`` without saying what kind of
# mask they give, which torch 1.13 and later refuse for every batch with padding. Their usual way of
# computing a layer gives the same result; later versions of fairseq have no other.


_LAYER = "fairseq.modules.transformer_layer:TransformerEncoderLayerBase"


def _unneeded_encoder_fast_path() -> Optional[str]:
    from fairseq.modules.transformer_layer import TransformerEncoderLayerBase

    if "_load_from_state_dict" not in vars(TransformerEncoderLayerBase):
        return "this fairseq has no fast path of its own"
    return "this torch takes the mask as it is" if torch_release() < (1, 13) else None


@wrapping
def without_fast_path(self: Any, *args: Any, original: Callable[..., None], **kwargs: Any) -> None:
    """Wrap an encoder layer's ``__init__``."""
    original(self, *args, **kwargs)
    self.can_use_fastpath = False


ENCODER_FAST_PATH = Patch(
    name="encoder fast path",
    reason="Evaluating or translating with a Transformer of fairseq 0.12.2 fails under torch "
    ">= 1.13 with 'Mask Type should be defined'.",
    install=replaces({f"{_LAYER}.__init__": without_fast_path}),
    unneeded=_unneeded_encoder_fast_path,
)


# ``--bf16`` trains on a GPU or CPU, not only on a TPU.


_FP16 = ("--fp16", "--memory-efficient-fp16")
_BF16 = ("--bf16", "--memory-efficient-bf16")


def _unneeded_bf16_without_tpu() -> Optional[str]:
    return "torch_xla is installed" if importlib.util.find_spec("torch_xla") is not None else None


@wrapping
def without_tpu(
    parser: Any, input_args: Any = None, *more: Any, original: Callable[..., Any], **kwargs: Any
) -> Any:
    """Wrap ``options.parse_args_and_arch`` so that ``--bf16`` does not imply ``--tpu``.

    Both kinds of half precision, of which fairseq says that TPUs have one, are refused.
    """
    arguments = sys.argv[1:] if input_args is None else input_args
    if {*_FP16} & {*arguments} and {*_BF16} & {*arguments}:
        raise clashing_flags(*(flag for flag in (*_FP16, *_BF16) if flag in arguments))
    parsed = original(parser, input_args, *more, **kwargs)
    args = parsed[0] if isinstance(parsed, tuple) else parsed
    # fairseq-validate and fairseq-generate parse once more without defaults: no attribute then.
    if getattr(args, "bf16", False) and "--tpu" not in arguments:
        args.tpu = False
    return parsed


BF16_WITHOUT_TPU = Patch(
    name="bf16 without TPU",
    reason="--bf16 switches to TPU training, which fails without torch_xla, on a GPU too.",
    install=replaces({"fairseq.options:parse_args_and_arch": without_tpu}),
    unneeded=_unneeded_bf16_without_tpu,
)


# ``--bf16`` evaluates in bfloat16, as ``--fp16`` evaluates in half precision.
#
# fairseq's commands that evaluate convert their models for ``--fp16`` alone, and compute in float32
# with ``--bf16``, in silence. A model of the hub stays in float32: its configuration is that of its
# training, which has no ``--path``.


def _unneeded_bf16_evaluation() -> Optional[str]:
    generate = importlib.import_module("fairseq_cli.generate")
    converts = "common.bf16" in inspect.getsource(generate)
    return "this fairseq evaluates in bfloat16" if converts else None


def evaluates(cfg: Any) -> bool:
    """Whether a configuration is that of a command that evaluates a model."""
    return bool(getattr(getattr(cfg, "common_eval", None), "path", None))


@wrapping
def prepared_in_bfloat16(
    model: Any, cfg: Any, *args: Any, original: Callable[..., Any], **kwargs: Any
) -> Any:
    """Wrap ``BaseFairseqModel.prepare_for_inference_``, which gets the command's configuration."""
    if evaluates(cfg) and cfg.common.bf16:
        model.bfloat16()
    return original(model, cfg, *args, **kwargs)


@wrapping
def loading_in_bfloat16(cfg: Any, *args: Any, original: Callable[..., Any], **kwargs: Any) -> Any:
    """Wrap ``call_main``, for ``fairseq-validate``, which does not prepare its models.

    Where fairseq starts workers itself, they validate in float32.
    """
    from fairseq import checkpoint_utils

    load = checkpoint_utils.load_model_ensemble_and_task

    def load_in_bfloat16(*args: Any, **kwargs: Any) -> Any:
        models, *others = load(*args, **kwargs)
        return [model.bfloat16() for model in models], *others

    if evaluates(cfg) and cfg.common.bf16:
        checkpoint_utils.load_model_ensemble_and_task = load_in_bfloat16
    try:
        return original(cfg, *args, **kwargs)
    finally:
        checkpoint_utils.load_model_ensemble_and_task = load


BF16_EVALUATION = Patch(
    name="bf16 in evaluation",
    reason="fairseq-generate, -interactive, -eval-lm and -validate compute in float32 with --bf16.",
    install=replaces(
        {
            "fairseq.models.fairseq_model:BaseFairseqModel.prepare_for_inference_": (
                prepared_in_bfloat16
            ),
            "fairseq.distributed.utils:call_main": loading_in_bfloat16,
        }
    ),
    unneeded=_unneeded_bf16_evaluation,
)


# Several workers on machines that have one GPU each, or none.
#
# fairseq numbers its workers by the GPUs of a machine. Where there is no GPU, torchrun fails with a
# division by zero, SLURM with an error of CUDA, and ``--distributed-init-method`` without
# ``--distributed-no-spawn`` ends with status 0 before anything was trained. A machine without GPUs
# counts as one device here.
#
# Newer versions than fairseq 0.12.2 also take one device for one worker, whatever torchrun says:
# each process then trains alone, and all of them write the same checkpoints.


def with_one_device(torch_module: types.ModuleType) -> Overlay:
    """An overlay of torch in which a machine without GPUs has one device."""
    cuda = torch_module.cuda

    # Asked at the time of the call, because asking starts CUDA, which would break later forks.
    def device_count() -> int:
        return max(1, cuda.device_count())

    def set_device(device: Any) -> None:
        if cuda.device_count():
            cuda.set_device(device)

    return Overlay(
        torch_module, cuda=Overlay(cuda, device_count=device_count, set_device=set_device)
    )


@wrapping
def as_many_as_torchrun_says(
    cfg: Any, *args: Any, original: Callable[..., None], **kwargs: Any
) -> None:
    """Wrap ``infer_init_method`` so that all workers of torchrun train together."""
    if cfg.distributed_init_method is None and "TORCHELASTIC_RUN_ID" in os.environ:
        cfg.distributed_world_size = int(os.environ["WORLD_SIZE"])
    original(cfg, *args, **kwargs)


def without_device_ids(data_parallel: Type[Any]) -> Type[Any]:
    """A subclass of torch's ``DistributedDataParallel`` that takes fairseq's device on a CPU.

    fairseq names device 0 for a model on a CPU too, which torch refuses.
    """

    class CpuDataParallel(data_parallel):  # type: ignore[misc]
        """torch's own, without the numbers of GPUs where the model is on none."""

        def __init__(self, module: Any, *args: Any, **kwargs: Any) -> None:
            if all(each.device.type == "cpu" for each in module.parameters()):
                kwargs.update(device_ids=None, output_device=None)
            super().__init__(module, *args, **kwargs)

    CpuDataParallel.__name__ = data_parallel.__name__
    CpuDataParallel.__qualname__ = data_parallel.__qualname__
    return CpuDataParallel


CPU_WORKERS = Patch(
    name="workers without GPUs",
    reason="Without GPUs, torchrun and SLURM fail, as does --ddp-backend pytorch_ddp, or train "
    "nothing with status 0; with one GPU per machine, the workers of torchrun train apart and "
    "overwrite each other's checkpoints.",
    install=replaces(
        {
            "fairseq.distributed.utils:torch": with_one_device,
            "fairseq.distributed.utils:infer_init_method": as_many_as_torchrun_says,
            "fairseq.models.distributed_fairseq_model:DistributedDataParallel": without_device_ids,
        }
    ),
)


# Trainings that hydra's joblib launcher starts can load data in processes of their own.
#
# joblib makes its own way of starting processes the default one in its workers. It cannot start
# those of ``torch.utils.data.DataLoader``, which fails with "'Process' object has no attribute
# 'env'".


def _unneeded_joblib_workers() -> Optional[str]:
    method = multiprocessing.get_start_method(allow_none=True)
    return None if method == "loky" else "joblib has not started this process"


def _install_joblib_workers() -> str:
    default = multiprocessing.get_all_start_methods()[0]
    multiprocessing.set_start_method(default, force=True)
    return f"processes start by {default}, as outside of joblib"


JOBLIB_WORKERS = Patch(
    name="data loading under joblib",
    reason="Under hydra's joblib launcher data can be loaded with dataset.num_workers=0 only, "
    "because joblib changes how processes are started.",
    install=_install_joblib_workers,
    unneeded=_unneeded_joblib_workers,
)


# A clean exit when training stops in the middle of an epoch.
#
# Note [Why the exit aborted]
# ---------------------------
# ``BufferedIterator`` fills its queue from a daemon thread. When training stops before the epoch's
# end (``--max-update``), nobody stops that thread. If it is inside torch when the interpreter shuts
# down, CPython ends it at its next attempt to take the GIL, by unwinding a C++ stack that does not
# expect it, and the process aborts (exit status 134) although everything was saved. So each thread
# is asked to stop, and waited for, before the shutdown begins.


_POLL_SECONDS = 0.1
_JOIN_SECONDS = 30.0  # one batch at most has to be finished; never hang an exit on a dead disk

_running: weakref.WeakSet[Any] = weakref.WeakSet()


def _unneeded_prefetch_thread() -> Optional[str]:
    from fairseq.data import iterators

    can_stop = hasattr(iterators.BackgroundConsumer, "stop")
    return "this fairseq can stop its prefetch thread" if can_stop else None


def stop_all() -> None:
    """Stop every prefetch thread and wait for it."""
    consumers = list(_running)
    for consumer in consumers:
        consumer.stop()
    for consumer in consumers:
        if consumer.is_alive():
            consumer.join(_JOIN_SECONDS)


class _InterruptibleQueue:
    """The putting end of a queue, which ends its thread once a stop was asked for."""

    def __init__(self, target: queue.Queue[Any], stop: threading.Event) -> None:
        self._target = target
        self._stop = stop

    def put(self, item: Any) -> None:
        while not self._stop.is_set():
            try:
                return self._target.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
        # Ends the thread silently, and is not caught by fairseq's `except Exception`.
        raise SystemExit


def stoppable(consumer: Type[Any]) -> Type[Any]:
    """A subclass of fairseq's ``BackgroundConsumer`` that is stopped before the exit."""

    class StoppableConsumer(consumer):  # type: ignore[misc]
        """fairseq's prefetch thread, with a way to stop it. See Note [Why the exit aborted]."""

        def __init__(self, target: queue.Queue[Any], *args: Any, **kwargs: Any) -> None:
            self._stop_asked = threading.Event()
            super().__init__(_InterruptibleQueue(target, self._stop_asked), *args, **kwargs)
            _running.add(self)

        def stop(self) -> None:
            self._stop_asked.set()

    StoppableConsumer.__name__ = consumer.__name__
    StoppableConsumer.__qualname__ = consumer.__qualname__
    atexit.register(stop_all)
    return StoppableConsumer


PREFETCH_THREAD = Patch(
    name="prefetch thread",
    reason="Stopping in the middle of an epoch (--max-update) often aborts at exit with status "
    "134, because the thread that prefetches batches still runs.",
    install=replaces({"fairseq.data.iterators:BackgroundConsumer": stoppable}),
    unneeded=_unneeded_prefetch_thread,
)


# ``fairseq-validate`` without ``--task`` says that the flag is missing.
#
# This patch only changes an error message. It is worth its lines because fairseq's other commands
# need no ``--task`` for translation, and this one answers with ``KeyError: None``.


@wrapping
def require_task(
    parser: argparse.ArgumentParser, *args: Any, original: Callable[..., Any], **kwargs: Any
) -> Any:
    """Wrap ``parse_args_and_arch`` so that a parser without a default task asks for ``--task``."""
    for action in parser._actions:
        if action.dest == "task" and action.default is None:
            action.required = True
    return original(parser, *args, **kwargs)


VALIDATION_TASK = Patch(
    name="task of fairseq-validate",
    reason="fairseq-validate without --task fails with 'KeyError: None'.",
    install=replaces({"fairseq.options:parse_args_and_arch": require_task}),
)


# Fine-tuning of mBART: its task reads its settings by the name that its base class once gave them.


@wrapping
def with_args(
    self: Any, args: Any, *more: Any, original: Callable[..., None], **kwargs: Any
) -> None:
    """Wrap the ``__init__`` of a task so that its settings have their older name, ``args``, too."""
    self.args = args
    original(self, args, *more, **kwargs)


_BART = "fairseq.tasks.translation_from_pretrained_bart:TranslationFromPretrainedBARTTask"
MBART_TASK = Patch(
    name="task of mBART",
    reason="--task translation_from_pretrained_bart fails with \"no attribute 'args'\".",
    install=replaces({f"{_BART}.__init__": with_args}),
)


# BASE layers (Lewis et al. 2021) where fairseq's compiled library is of another torch.


def _unneeded_base_layers() -> Optional[str]:
    try:
        importlib.import_module("fairseq.libbase")
    except ImportError:
        return None
    return "this fairseq's library fits this torch"


def balanced_assignment(scores: torch.Tensor) -> torch.Tensor:
    """The assignment of equally many tokens to each expert that has the largest sum of scores.

    Args:
        scores: tokens x experts; of finite numbers.

    Returns:
        Indices of the tokens, int64 ``(tokens,)``: those of the first expert, then the second's.

    Raises:
        ConfigurationError: the tokens cannot be shared out equally.
    """
    with needs_extra("predictions", "for BASE layers"):
        from scipy.optimize import linear_sum_assignment
    tokens, experts = scores.shape
    if tokens % experts:
        raise ConfigurationError(
            f"a number of tokens that {experts} experts of BASE layers can share equally",
            f"{tokens:,}",
            "Give --tokens-per-sample and --batch-size whose product is a multiple of the experts.",
        )
    places = scores.detach().float().cpu().repeat_interleave(tokens // experts, dim=1)
    order, place = linear_sum_assignment(places.numpy(), maximize=True)
    return torch.from_numpy(order[place.argsort(kind="stable")]).to(scores.device)


@wrapping
def without_library(self: Any, *, original: Callable[..., Any]) -> Any:  # noqa: ARG001
    """Replace ``BaseLayer.load_assignment``."""
    return types.SimpleNamespace(balanced_assignment=balanced_assignment)


BASE_LAYERS = Patch(
    name="BASE layers",
    reason="Models with --base-layers fail where fairseq's library libbase was compiled for "
    "another torch ('undefined symbol'); the assignment is computed by scipy instead.",
    install=replaces({"fairseq.modules.base_layer:BaseLayer.load_assignment": without_library}),
    unneeded=_unneeded_base_layers,
)
