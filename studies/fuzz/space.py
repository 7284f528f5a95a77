"""The space of options: every architecture, table, head, penalty, criterion and optimiser.

The flags and their types come from what is registered with fairseq, so that a new table or penalty
is drawn without a change here. A case is determined by its number.
"""

from __future__ import annotations

import argparse
import functools
import random
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

# fairseq's own architectures, which take all criterions and optimisers of this package.
PLAIN = ("transformer", "transformer_lm", "lstm", "lstm_lm", "fconv", "lightconv_lm")
PLAIN_CRITERIONS = ("cross_entropy", "label_smoothed_cross_entropy", "adaptive_loss")
OPTIMIZERS = (
    *("adam", "adam", "sgd", "nag", "adagrad", "adadelta", "adafactor", "adamax"),
    *("nt_asgd", "nt_asgd"),
)
SCHEDULES = ("fixed", "fixed", "inverse_sqrt", "polynomial_decay", "cosine", "nt_asgd")

# Small sizes, for flags that an architecture has.
SIZES: Dict[str, Sequence[str]] = {
    "--encoder-embed-dim": ("16",) * 8 + ("8",),
    "--decoder-embed-dim": ("16",) * 8 + ("8",),
    "--encoder-ffn-embed-dim": ("24",),
    "--decoder-ffn-embed-dim": ("24",),
    "--encoder-layers": ("1",),
    "--decoder-layers": ("1",) * 4 + ("2",),
    "--encoder-attention-heads": ("2",),
    "--decoder-attention-heads": ("2",),
    "--decoder-input-dim": ("16",) * 8 + ("8",),
    "--decoder-output-dim": ("16",) * 8 + ("8",),
    "--encoder-hidden-size": ("16",),
    "--decoder-hidden-size": ("16", "12"),
    "--decoder-out-embed-dim": ("16",) * 4 + ("8",),
    "--mem-len": ("0", "10"),
    "--mixture-components": ("1", "2", "3", "5"),
}
SIZES_OF: Dict[str, Dict[str, Sequence[str]]] = {
    "fconv": {
        "--encoder-layers": ("[(16, 3)]",),
        "--decoder-layers": ("[(16, 3)]",),
        "--decoder-attention": ("True",),
    },
    "transformer_xl": {"--adaptive-softmax-cutoff": ("10,20",) * 4 + ("5", "[]", "10,9")},
    "lightconv_lm": {"--decoder-layers": ("1",), "--decoder-kernel-size-list": ("[3]",)},
}
# Flags whose texts have a form.
VALUES: Dict[str, Sequence[str]] = {
    "--spectrum-c1": ("auto", "auto", "1", "0.1", "x"),
    "--orthogonality-weights": ("1,0,1,0", "0.1,0.1,0,0", "0,0,0.1,0.1", "0,0,0,0", "1,1"),
    "--adaptive-softmax-cutoff": ("10,20", "8"),
    "--adaptive-input-cutoff": ("10,20",),
    "--adam-betas": ("(0.9, 0.98)", "(0, 0)", "(0.9,)"),
    "--encoder-embed-path": ("/dev/null",),
    "--decoder-embed-path": ("/dev/null",),
}
# How often a value is drawn that is probably refused.
WILD = 0.06
WHOLE, WILD_WHOLE = ("1", "2", "3"), ("0", "-1", "1000000000000")
REAL, WILD_REAL = ("0", "0.01", "0.1", "0.5", "1"), ("-1", "2", "nan", "inf", "1e30")

# Flags of fairseq's trainer, and how often each is drawn.
COMMON: Tuple[Tuple[float, Tuple[str, ...]], ...] = (
    (0.2, ("--update-freq", "2")),
    (0.2, ("--clip-norm", "0.1")),
    (0.1, ("--sentence-avg",)),
    (0.06, ("--bf16",)),
    (0.04, ("--fp16",)),
    (0.06, ("--fp16", "--fp16-no-flatten-grads")),
    (0.04, ("--memory-efficient-fp16",)),
    (0.04, ("--amp",)),
    (0.05, ("--store-ema",)),
    (0.05, ("--no-save-optimizer-state",)),
    (0.05, ("--validate-interval-updates", "1")),
    (0.01, ("--ddp-backend", "fully_sharded")),
    (0.01, ("--use-bmuf",)),
)
# Trainings of two updates would end before what is done every tenth update.
AT_ONCE = ("--spectrum-decay-interval", "--svd-interval")
HALF = {"--bf16", "--fp16", "--memory-efficient-fp16", "--amp"}


class Case(NamedTuple):
    """A training to try.

    Attributes:
        data: name of the data folder; see :mod:`studies.fuzz.data`.
        task: what ``--task`` is.
        argv: arguments of ``fairseq-train`` beside the data and where to save.
    """

    data: str
    task: str
    argv: List[str]


def draw(number: int) -> Case:
    """The case of a number."""
    chance = random.Random(f"options {number}")
    arch = chance.choice(_architectures())
    model = _model(arch)
    language_model = issubclass(model, _classes().language_model)
    stateful = bool(getattr(model, "stateful", False))
    task = "language_modeling" if language_model else "translation"
    if stateful or (language_model and chance.random() < 0.05):
        task = "stateful_language_modeling"
    criterion = chance.choice(_criterions())
    optimizer, schedule = chance.choice(OPTIMIZERS), chance.choice(SCHEDULES)
    if chance.random() < 0.9:  # each of the two is refused without the other
        schedule = "nt_asgd" if optimizer == "nt_asgd" else schedule
        schedule = "fixed" if schedule == "nt_asgd" != optimizer else schedule
    argv = ["--arch", arch, "--task", task, "--criterion", criterion]
    argv += ["--optimizer", optimizer, "--lr-scheduler", schedule, "--lr", "0.005"]
    argv += ["--total-num-update", "10"] if schedule == "polynomial_decay" else []
    argv += _batches(task, chance)
    registries = _classes()
    flags = {
        **_flags(model),
        **_flags(registries.criterions[criterion]),
        **_flags(registries.optimizers[optimizer]),
        **_flags(registries.schedules[schedule]),
    }
    sizes = {**SIZES, **next((SIZES_OF[name] for name in SIZES_OF if arch.startswith(name)), {})}
    for name in sizes:
        if name in flags:
            argv += [name, chance.choice(list(sizes[name]))]
    ours: List[str] = []
    theirs: List[str] = []
    for name in sorted(set(flags) - set(sizes)):
        (ours if name in _our_flags() else theirs).append(name)
    shared = [name for name in theirs if "share" in name]
    if shared and chance.random() < 0.6:
        argv.append(chance.choice(shared))
    chosen = chance.sample(ours, min(len(ours), chance.randint(0, 6)))
    chosen += chance.sample(theirs, min(len(theirs), chance.choice((0, 0, 0, 1))))
    for name in chosen:
        argv += _given(flags[name], name, chance)
    for probability, arguments in COMMON:
        if chance.random() < probability:
            argv += arguments
    argv += _at_once(flags, arch, argv, number)
    if criterion == "adaptive_loss":
        argv += ["--ddp-backend", "legacy_ddp"]
    data = "language" if language_model else chance.choice(("joined",) * 4 + ("separate",))
    return Case(data, task, argv)


def _at_once(flags: Any, arch: str, argv: List[str], number: int) -> List[str]:
    """Every update instead of every tenth, in half of the cases that have the flag."""
    chance = random.Random(f"at once {number}")
    factored = "_sc" in arch and "--embedding-type" not in argv or "svd" in argv
    found = []
    for name in AT_ONCE:
        suits = factored or name != "--svd-interval"  # refused with other tables
        if name in flags and name not in argv and suits and chance.random() < 0.5:
            found += [name, "1"]
    return found


def _batches(task: str, chance: random.Random) -> List[str]:
    if task == "stateful_language_modeling":
        return ["--batch-size", "3", "--batch-size-valid", "2", "--tokens-per-sample", "10"]
    if task == "language_modeling":
        mode = chance.choice(("none", "eos", "complete"))
        return ["--max-tokens", "96", "--tokens-per-sample", "16", "--sample-break-mode", mode]
    return ["--max-tokens", "96"]


def _given(action: argparse.Action, name: str, chance: random.Random) -> List[str]:
    """A flag and a value for it; nothing if its form is not known."""
    if action.nargs == 0:
        return [name]
    if name in VALUES:
        return [name, chance.choice(list(VALUES[name]))]
    if action.choices:
        return [name, str(chance.choice(sorted(map(str, action.choices))))]
    wild = chance.random() < WILD
    if action.type is int:
        return [name, chance.choice(WILD_WHOLE if wild else WHOLE)]
    if action.type is float:
        return [name, chance.choice(WILD_REAL if wild else REAL)]
    return []


class _Classes(NamedTuple):
    architectures: Dict[str, Any]
    criterions: Dict[str, Any]
    optimizers: Dict[str, Any]
    schedules: Dict[str, Any]
    language_model: Any


@functools.cache
def _classes() -> _Classes:
    from fairseq.criterions import CRITERION_REGISTRY
    from fairseq.models import ARCH_MODEL_REGISTRY, FairseqLanguageModel
    from fairseq.optim import OPTIMIZER_REGISTRY
    from fairseq.optim.lr_scheduler import LR_SCHEDULER_REGISTRY

    import spectral_fairseq.plugin  # noqa: F401  (registers with fairseq)

    return _Classes(
        ARCH_MODEL_REGISTRY,
        CRITERION_REGISTRY,
        OPTIMIZER_REGISTRY,
        LR_SCHEDULER_REGISTRY,
        FairseqLanguageModel,
    )


@functools.cache
def _architectures() -> List[str]:
    ours = [
        arch
        for arch, model in _classes().architectures.items()
        if model.__module__.startswith("spectral_fairseq.")
    ]
    return sorted(ours) + list(PLAIN)


@functools.cache
def _criterions() -> List[str]:
    from fairseq.criterions import CRITERION_REGISTRY

    from spectral_fairseq.plugin.criterion import PenalisedCrossEntropy

    presets = [
        name for name, kind in CRITERION_REGISTRY.items() if issubclass(kind, PenalisedCrossEntropy)
    ]
    return presets * 3 + list(PLAIN_CRITERIONS)


def _model(arch: str) -> Any:
    return _classes().architectures[arch]


@functools.cache
def _our_flags() -> frozenset:
    from spectral_fairseq.commands.flags import flag_sections

    return frozenset(flag.name for flags in flag_sections().values() for flag in flags)


@functools.cache
def _flags(registered: Any) -> Dict[str, argparse.Action]:
    """The flags that a registered class adds to fairseq's parser."""
    parser = argparse.ArgumentParser(add_help=False)
    if hasattr(registered, "add_args"):
        registered.add_args(parser)
    return {action.option_strings[-1]: action for action in parser._actions}
