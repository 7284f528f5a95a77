"""What is trained, as data. protocol.md explains the choices, which stay as they are.

A training is a recipe, shared by all methods of a study, and one setting of one method.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Dict, Mapping, NamedTuple, Tuple


class Setting(NamedTuple):
    """Flags of a method.

    Attributes:
        flags: added to the command; a flag given before is overridden.
        lr_factor: factor of the recipe's learning rate.
    """

    flags: str = ""
    lr_factor: float = 1.0


@dataclass(frozen=True)
class Method:
    """A method and the settings among which it is tuned.

    Args:
        label: its name in tables.
        arch: a key of :attr:`Study.archs`.
        flags: common to all its settings.
        settings: what is tried, on validation and with the tuning seed only.
        on_table: whether it acts on the output table alone, at the time of a plain update.
    """

    label: str
    arch: str
    flags: str
    settings: Tuple[Setting, ...]
    on_table: bool = False


Recipe = Mapping[str, str]
"""Values of flags without their dashes; the key ``subwords`` chooses the data."""


@dataclass(frozen=True)
class Study:
    """A model on a corpus, its recipe and what is compared.

    Args:
        corpus: ``translation`` or ``language_model``.
        model: what is trained, for a figure.
        flags: fixed for every training.
        archs: flags of the architecture, by its kind.
        recipe: the first guess, from which the rounds start.
        rounds: for each round the changes to the recipe that are tried with plain; the best one is
            kept before the next round. No change is always among them.
        methods: what is compared; ``plain`` comes first and has one setting.
        seeds: of the trainings in the tables.
        tuning_seed: of the trainings on which anything is chosen. It is in no table.
        with_simcut: whether the best table method is combined with SimCut.
        guessed_updates: for the bars of trainings that early stopping ends.
        pairs: for translation, those of the training text.
        words: for a language model, about those of the training text. On two cores one cannot be
            trained to its end on all 1.8 million.
        plain_of: a study with the same flags and recipe.
        finals_of: another one with the same final trainings on the processor of this study, which
            are taken instead.
        shared: the methods whose trainings are those of that study.
        tuned: false where an earlier study has chosen the recipe and a setting for each method.
        length_penalties: for translation, those among which each training has its own, chosen by
            BLEU on its validation set.
        contrasts: pairs of methods that are compared with each other, too, the second one being
            the baseline.
        unplanned: pairs, the second one being the baseline, that the study began or changed when it
            had results; the table of protocol.md names them.
    """

    corpus: str
    model: str
    flags: str
    archs: Mapping[str, str]
    recipe: Recipe
    rounds: Tuple[Tuple[Recipe, ...], ...]
    methods: Mapping[str, Method]
    seeds: Tuple[int, ...]
    tuning_seed: int = 1
    with_simcut: bool = False
    guessed_updates: int = 10_000
    pairs: int = 10_000
    words: int = 450_000
    plain_of: str = ""
    finals_of: str = ""
    shared: Tuple[str, ...] = ("plain",)
    tuned: bool = True
    length_penalties: Tuple[float, ...] = (1.0,)
    contrasts: Tuple[Tuple[str, str], ...] = ()
    unplanned: Tuple[Tuple[str, str], ...] = ()

    @property
    def elsewhere(self) -> Tuple[str, ...]:
        """The methods of which another study has the trainings and the comparison with plain."""
        return self.shared if self.plain_of else ()


# fairseq shuffles with the sum of the seed and the epoch, and draws dropout with that of the seed
# and the update: seeds that are closer would give trainings that share one and the other.
_SEEDS = (100_000, 200_000, 300_000, 400_000, 500_000)
_FRESH_SEEDS = tuple(range(600_000, 1_400_000, 100_000))  # for what a first study left open


def _settings(*flags: str) -> Tuple[Setting, ...]:
    return tuple(map(Setting, flags))


def _each(flag: str, *values: float) -> Tuple[Setting, ...]:
    return _settings(*(f"{flag} {value:g}" for value in values))


# For methods without a number of their own.
_RATES = tuple(Setting("", factor) for factor in (0.25, 0.5, 0.7, 1.0, 1.4, 2.0))


_OURS = "--criterion mle_cosreg --cosreg-weight 0"  # the likelihood, and what further flags add
_CONTROL = "--criterion spectrum_control"

PLAIN = Method("plain", "plain", _OURS, (Setting(),))
TABLE_METHODS = {
    "factored": Method(
        "spectrum control, factored",
        "svd",
        f"{_CONTROL} --svd-interval 0",
        _settings(
            "",
            "--spectrum-c2 0.005",
            "--spectrum-c2 0.01",
            "--spectrum-prior polynomial --spectrum-gamma 0.25",
            "--spectrum-weight 0.001 --orthogonality-weights 0.01,0.01,0,0",
            "--spectrum-c2 0.005 --spectrum-weight 0.001 --orthogonality-weights 0.01,0.01,0,0",
        ),
        on_table=True,
    ),
    "decoupled": Method(
        "spectrum control, decoupled",
        "plain",
        _CONTROL,
        _settings(
            "",
            "--spectrum-slack 2",
            "--spectrum-slack 1.5",
            "--table-centering 0.1 --spectrum-decay 0.1",
            "--table-centering 0.1 --spectrum-decay 0.1 --spectrum-slack 2",
            "--spectrum-decay 0",
        ),
        on_table=True,
    ),
    "cosine": Method(
        "cosine regularisation",
        "plain",
        "--criterion mle_cosreg",
        _each("--cosreg-weight", 0.1, 0.3, 1, 3, 10, 30),
        on_table=True,
    ),
    "weight_norm": Method(
        "weight-norm regularisation",
        "plain",
        "--criterion weight_norm",
        _settings(
            "--weight-norm-target 1",
            "--weight-norm-target 2",
            "--weight-norm-weight 0.01 --weight-norm-target 1",
            "--weight-norm-weight 0.01 --weight-norm-target 2",
            "--weight-norm-weight 0.01 --weight-norm-target 1 --weight-norm-target-by-count",
            "--weight-norm-weight 0.1 --weight-norm-target 1",
        ),
        on_table=True,
    ),
    "weight_norm_init": Method(
        "weight-norm initialisation",
        "weight-norm",
        _OURS,
        _each("--weight-norm-init-sigma", 0.07, 0.1, 0.15, 0.2, 0.3, 0.5),
        on_table=True,
    ),
}
# Factors that are renewed cannot be averaged, as the AWD-LSTM's weights are. Their steps have other
# lengths than those of a plain table, so learning rates are among the settings.
RENEWED = {
    "renewed": Method(
        "spectrum control, factors renewed",
        "svd",
        f"{_CONTROL} --svd-interval 10",
        (
            *(Setting("", factor) for factor in (0.5, 0.7, 1.0, 1.4)),
            *_settings("--spectrum-weight 0.001", "--spectrum-c2 0.005 --spectrum-weight 0.001"),
        ),
        on_table=True,
    ),
}
LOSS_METHODS = {
    "adversarial": Method(
        "adversarial softmax",
        "plain",
        _OURS,
        _each("--adversarial-epsilon", 0.002, 0.005, 0.01, 0.02, 0.05, 0.1),
    ),
    "gradient_gating": Method(
        "adaptive gradient gating",
        "plain",
        _OURS,
        _each("--gradient-gating", 0.01, 0.02, 0.03, 0.05, 0.1, 0.2),
    ),
    "sigsoftmax": Method("sigsoftmax", "sigsoftmax", _OURS, _RATES),
}
COUPLED_ADAM = {
    "coupled_adam": Method("Coupled Adam", "plain", f"{_OURS} --optimizer coupled_adam", _RATES)
}
CONSISTENCY = {
    "rdrop": Method("R-Drop", "plain", _OURS, _each("--rdrop-weight", 0.3, 1, 2, 3, 5, 10)),
    "simcut": Method(
        "SimCut",
        "plain",
        _OURS,
        _settings(
            *(
                f"--simcut-weight {weight} --simcut-cutoff {cutoff}"
                for weight in (1, 3)
                for cutoff in (0.05, 0.1, 0.2)
            )
        ),
    ),
}


MIXTURE = Method(
    "mixture of softmaxes",
    "mos",
    _OURS,
    _settings(
        *(
            f"--mixture-components {components} --mixture-context-scale {scale}"
            for components in (2, 4)
            for scale in (2, 4, 8)
        )
    ),
)
# An LSTM's contexts are as large as the published ones; its mixtures were trained at half the rate.
LSTM_MIXTURE = Method(
    "mixture of softmaxes",
    "mos",
    _OURS,
    tuple(
        Setting(f"--mixture-components {components}", factor)
        for components in (2, 4)
        for factor in (0.25, 0.5, 1.0)
    ),
)

# Weight decay shortens word vectors, too, and needs none of this package.
WEIGHT_DECAY = Method("weight decay", "plain", _OURS, _each("--weight-decay", 0.01, 0.05, 0.2))

_COMMON = (
    "--no-epoch-checkpoints --num-workers 0 --data-buffer-size 0 --log-format json "
    "--log-interval 50 --distributed-world-size 1"
)
_WITH_PATIENCE = (
    "--best-checkpoint-metric nll_loss --patience 10 --max-epoch 200 --lr-scheduler inverse_sqrt "
    "--warmup-updates 400"
)


def _annealed(updates: int) -> str:
    """Flags of a fixed budget, over which the learning rate falls to zero."""
    return (
        f"--best-checkpoint-metric nll_loss --max-update {updates} --lr-scheduler polynomial_decay "
        f"--total-num-update {updates} --warmup-updates 400"
    )


def _translation(dim: int, layers: int, heads: int, schedule: str) -> str:
    """Flags of a Transformer that translates, with one width everywhere."""
    return (
        f"{_COMMON} {schedule} --source-lang de --target-lang en --share-all-embeddings "
        f"--encoder-embed-dim {dim} --decoder-embed-dim {dim} --encoder-ffn-embed-dim {2 * dim} "
        f"--decoder-ffn-embed-dim {2 * dim} --encoder-layers {layers} --decoder-layers {layers} "
        f"--encoder-attention-heads {heads} --decoder-attention-heads {heads} --optimizer adam "
        "--adam-betas (0.9,0.98) --clip-norm 1.0 --max-tokens 1600"
    )


_TRANSLATION_ARCHS = {
    "plain": "--arch transformer",
    "svd": "--arch transformer_sc",
    "weight-norm": "--arch transformer_sc --embedding-type weight-norm",
    "mos": "--arch transformer_mos",
    "sigsoftmax": "--arch transformer_sc --embedding-type plain --output-head sigsoftmax",
}
TRANSLATION = Study(
    corpus="translation",
    model="translation, d = 128",
    flags=_translation(dim=128, layers=3, heads=4, schedule=_WITH_PATIENCE),
    archs=_TRANSLATION_ARCHS,
    recipe={"subwords": "4000", "dropout": "0.3", "label-smoothing": "0.1", "lr": "0.002"},
    rounds=(
        ({"subwords": "2000"}, {"subwords": "8000"}),
        ({"dropout": "0.1"}, {"dropout": "0.2"}, {"dropout": "0.4"}),
        ({"label-smoothing": "0.0"}, {"label-smoothing": "0.2"}, {"label-smoothing": "0.3"}),
        (
            {"attention-dropout": "0.1", "activation-dropout": "0.1"},
            {"encoder-layerdrop": "0.1", "decoder-layerdrop": "0.1"},
        ),
        ({"lr": "0.001"}, {"lr": "0.004"}),
    ),
    methods={
        "plain": PLAIN,
        **TABLE_METHODS,
        **RENEWED,
        **LOSS_METHODS,
        **COUPLED_ADAM,
        **CONSISTENCY,
        "mixture": MIXTURE,
    },
    seeds=_SEEDS,
    with_simcut=True,
)


def _with_settings(method: Method, *indices: int) -> Method:
    return replace(method, settings=tuple(method.settings[index] for index in indices))


# As fine as the learning rates of any method of the small studies; they begin at 0.004.
_FINE_RATES: Tuple[Recipe, ...] = tuple(
    {"lr": rate} for rate in ("0.002", "0.0028", "0.0056", "0.008")
)
_SMALL_CONTROL = {
    "renewed": _with_settings(RENEWED["renewed"], 1, 2, 3),
    "decoupled": _with_settings(TABLE_METHODS["decoupled"], 0, 2, 4),
}
_SMALL_INIT = _with_settings(TABLE_METHODS["weight_norm_init"], 1, 2, 3)
_SMALL_WEIGHT_NORM = _with_settings(TABLE_METHODS["weight_norm"], 0, 2, 4)
TRANSLATION_SMALL = Study(
    corpus="translation",
    model="translation, d = 64",
    flags=_translation(
        dim=64,
        layers=2,
        heads=2,
        schedule=_annealed(5_000),
    ),
    archs=_TRANSLATION_ARCHS,
    recipe={"subwords": "2000", "dropout": "0.1", "label-smoothing": "0.1", "lr": "0.004"},
    rounds=(({"dropout": "0.0"}, {"dropout": "0.2"}), _FINE_RATES),
    methods={
        "plain": PLAIN,
        **_SMALL_CONTROL,
        "weight_norm_init": _SMALL_INIT,
        "simcut": _with_settings(CONSISTENCY["simcut"], 1, 3, 5),
    },
    seeds=_SEEDS,
    with_simcut=True,
    guessed_updates=5_000,
)

# The other methods, with the recipe that translation_small has chosen and frozen.
TRANSLATION_METHODS_SMALL = replace(
    TRANSLATION_SMALL,
    recipe={**TRANSLATION_SMALL.recipe, "lr": "0.0056"},
    rounds=(),
    methods={
        "plain": PLAIN,
        "cosine": _with_settings(TABLE_METHODS["cosine"], 0, 2, 4),
        "weight_norm": _SMALL_WEIGHT_NORM,
        "adversarial": _with_settings(LOSS_METHODS["adversarial"], 1, 3, 5),
        "gradient_gating": _with_settings(LOSS_METHODS["gradient_gating"], 0, 2, 4),
        "mixture": _with_settings(MIXTURE, 1, 3, 5),
        "rdrop": _with_settings(CONSISTENCY["rdrop"], 0, 1, 3),
        "weight_decay": WEIGHT_DECAY,
    },
    with_simcut=False,
    plain_of="translation_small",
)

# The methods that gained are compared with a plain recipe whose weight decay is tuned first.
TRANSLATION_DECAY_SMALL = replace(
    TRANSLATION_METHODS_SMALL,
    model="translation, d = 64, weight decay",
    recipe={**TRANSLATION_METHODS_SMALL.recipe, "weight-decay": "0.05"},
    rounds=(
        ({"weight-decay": "0.025"}, {"weight-decay": "0.1"}),
        ({"lr": "0.004"}, {"lr": "0.008"}),
    ),
    methods={
        "plain": PLAIN,
        "weight_norm_init": _with_settings(TABLE_METHODS["weight_norm_init"], 0, 1, 2),
        "weight_norm": _SMALL_WEIGHT_NORM,
        "renewed": _SMALL_CONTROL["renewed"],
    },
    plain_of="",
)

# Does weight-norm initialisation gain by its table, or by the short vectors with which it starts?
# It has the recipe, the seeds and the plain trainings of TRANSLATION_DECAY_SMALL.
_OWN_DECAYS = ("0.05", "0.1")
TRANSLATION_START_SMALL = replace(
    TRANSLATION_DECAY_SMALL,
    model="translation, d = 64, the start of the table",
    recipe={**TRANSLATION_DECAY_SMALL.recipe, "lr": "0.0056", "weight-decay": "0.1"},
    rounds=(),
    methods={
        "plain": PLAIN,
        "short_start": Method(
            "plain, scaled start",
            "plain",
            _OURS,
            _settings(
                *(
                    f"--encoder-embed-path {{start:{scale}}} --weight-decay {decay}"
                    for scale in (0.125, 0.25, 0.5)
                    for decay in _OWN_DECAYS
                )
            ),
            on_table=True,
        ),
    },
    plain_of="translation_decay_small",
)

# Do these differences last in trainings four times as long? The recipe and each arm's weight decay
# are tuned anew for that length.
TRANSLATION_START_LONG = replace(
    TRANSLATION_START_SMALL,
    model="translation, d = 64, the start of the table, 20,000 updates",
    flags=(
        f"{_translation(dim=64, layers=2, heads=2, schedule=_annealed(20_000))} "
        "--validate-interval 2 --save-interval 2 --fast-dropout"
    ),
    rounds=(({"dropout": "0.2"},), ({"weight-decay": "0.05"}, {"weight-decay": "0.2"})),
    methods={
        "plain": PLAIN,
        "weight_norm_init": replace(
            TABLE_METHODS["weight_norm_init"],
            flags=f"{_OURS} --weight-norm-init-sigma 0.07",
            settings=_each("--weight-decay", 0.025, 0.05, 0.1),
        ),
        "short_start": replace(
            TRANSLATION_START_SMALL.methods["short_start"],
            flags=f"{_OURS} --encoder-embed-path {{start:0.25}}",
            settings=_each("--weight-decay", 0.025, 0.05, 0.1, 0.2, 0.4),
        ),
        "log_count_start": Method(
            "plain, lengths from counts",
            "plain",
            f"{_OURS} --encoder-embed-path {{lengths:0.07}}",
            settings=_each("--weight-decay", 0.05, 0.1),
            on_table=True,
        ),
    },
    seeds=_FRESH_SEEDS[:5],
    guessed_updates=20_000,
    plain_of="",
    length_penalties=(0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 2.0),
    contrasts=(("weight_norm_init", "short_start"), ("weight_norm_init", "log_count_start")),
)

# Is what weight norm gains a larger step of the table? The decay of a step is the rate times the
# weight decay, so the table's own is kept, or divided by the factor on its rate.
TRANSLATION_RATE_SMALL = replace(
    TRANSLATION_START_SMALL,
    model="translation, d = 64, the rate of the table",
    methods={
        "plain": PLAIN,
        "table_rate": Method(
            "plain, a rate of the table's own",
            "plain",
            _OURS,
            _settings(
                *(
                    f"--table-lr-scale {scale} --table-weight-decay {0.1 / divided:g}"
                    for scale in (2, 4, 8)
                    for divided in (1, scale)
                )
            ),
            on_table=True,
        ),
    },
    finals_of="translation_bfloat16_small",
)

# Muon for the hidden matrices, alone and on top of the table that gained; own rate and decay.
_INIT = _with_settings(TABLE_METHODS["weight_norm_init"], 0)  # as TRANSLATION_DECAY_SMALL chose it
_MUON = "--optimizer muon"
_MUON_SETTINGS = tuple(
    Setting(f"--weight-decay {decay}", factor)
    for decay in (0.05, 0.1, 0.2)
    for factor in (0.5, 1.0)
)
_MUON_METHODS = {
    "plain": PLAIN,
    "muon": Method("Muon", "plain", f"{_OURS} {_MUON}", _MUON_SETTINGS),
    "muon_init": Method(
        "Muon with weight-norm initialisation",
        "weight-norm",
        f"{_OURS} {_MUON} --weight-norm-init-sigma 0.07",
        _MUON_SETTINGS,
    ),
}
TRANSLATION_MUON_SMALL = replace(
    TRANSLATION_START_SMALL,
    model="translation, d = 64, Muon",
    methods={**_MUON_METHODS, "weight_norm_init": _INIT},
    seeds=_SEEDS[:3],
    finals_of="translation_bfloat16_small",
    shared=("plain", "weight_norm_init"),
    contrasts=(("muon_init", "muon"), ("muon_init", "weight_norm_init")),
)
# Twenty thousand updates, at the settings that TRANSLATION_MUON_SMALL has chosen: plain and the
# initialisation are tuned for this length, Muon is not, so its gain can only be too small.
_LONG_INIT = TRANSLATION_START_LONG.methods["weight_norm_init"]
TRANSLATION_MUON_LONG = replace(
    TRANSLATION_START_LONG,
    model="translation, d = 64, Muon, 20,000 updates",
    rounds=(),
    methods={
        "plain": PLAIN,
        "weight_norm_init": _with_settings(_LONG_INIT, 1),
        "muon": _with_settings(_MUON_METHODS["muon"], 3),
        "muon_init": _with_settings(_MUON_METHODS["muon_init"], 3),
    },
    seeds=_FRESH_SEEDS[:3],
    tuned=False,
    plain_of="translation_start_long",
    shared=("plain", "weight_norm_init"),
    contrasts=(("muon_init", "muon"), ("muon_init", "weight_norm_init")),
)

# Is bfloat16 on a CPU level with float32? At the settings that TRANSLATION_DECAY_SMALL has chosen,
# with trainings in float32 on the same processor: on another, rounding alone makes other trainings.
TRANSLATION_BFLOAT16_SMALL = replace(
    TRANSLATION_START_SMALL,
    model="translation, d = 64, bfloat16",
    methods={
        "plain": PLAIN,
        "plain_bf16": Method("plain, bfloat16", "plain", f"{_OURS} --bf16", (Setting(),)),
        "weight_norm_init": _INIT,
        "init_bf16": replace(
            _INIT, label=f"{_INIT.label}, bfloat16", flags=f"{_INIT.flags} --bf16"
        ),
    },
    plain_of="",
    tuned=False,
    contrasts=(("init_bf16", "weight_norm_init"),),
)

# Does the gain last with three times the text and twice the width?
TRANSLATION_MEDIUM = replace(
    TRANSLATION_SMALL,
    model="translation, d = 128, 31,000 pairs, weight decay",
    flags=_translation(dim=128, layers=3, heads=4, schedule=_annealed(5_000)),
    recipe={
        **{"subwords": "4000", "dropout": "0.1", "label-smoothing": "0.1"},
        **{"lr": "0.0028", "weight-decay": "0.1"},
    },
    rounds=(
        ({"lr": "0.002"}, {"lr": "0.004"}, {"dropout": "0.2"}),
        ({"weight-decay": "0.05"}, {"weight-decay": "0.2"}),
        ({"lr": "0.0056"}, {"dropout": "0.0"}),
    ),
    methods={
        "plain": PLAIN,
        "weight_norm_init": replace(
            TABLE_METHODS["weight_norm_init"],
            settings=_each("--weight-norm-init-sigma", 0.05, 0.07, 0.1, 0.15),
        ),
    },
    with_simcut=False,
    pairs=30_953,
)

_STATEFUL = "--task stateful_language_modeling --batch-size 20 --batch-size-valid 10"


def _awd_lstm(dim: int, hidden: int) -> str:
    """Flags of an AWD-LSTM of three layers, with NT-ASGD's own schedule."""
    return (
        f"{_COMMON} {_STATEFUL} --decoder-embed-dim {dim} --tokens-per-sample 35 --variable-bptt "
        f"--decoder-hidden-size {hidden} --decoder-last-hidden-size {dim} --decoder-layers 3 "
        "--optimizer nt_asgd --lr-scheduler nt_asgd --nt-asgd-stop --weight-decay 1.2e-6 "
        "--clip-norm 0.25 --best-checkpoint-metric nll_loss --max-epoch 200"
    )


AWD_LSTM = Study(
    corpus="language_model",
    model="AWD-LSTM, d = 128",
    flags=_awd_lstm(dim=128, hidden=256),
    archs={
        "plain": "--arch awd_lstm_wt2",
        "svd": "--arch awd_lstm_wt2 --embedding-type svd",
        "weight-norm": "--arch awd_lstm_wt2 --embedding-type weight-norm",
        "mos": "--arch awd_lstm_mos_wt2 --mixture-dropout 0.1",
        "sigsoftmax": "--arch awd_lstm_wt2 --output-head sigsoftmax",
    },
    recipe={
        **{"dropout": "0.3", "input-dropout": "0.3", "hidden-dropout": "0.2"},
        **{"word-dropout": "0.1", "weight-drop": "0.3", "lr": "30"},
    },
    rounds=(
        (
            {"dropout": "0.2", "input-dropout": "0.2", "hidden-dropout": "0.1"},
            {"dropout": "0.4", "input-dropout": "0.5", "hidden-dropout": "0.2"},
        ),
        ({"weight-drop": "0.2"}, {"weight-drop": "0.5"}),
        ({"lr": "15"}, {"lr": "45"}),
    ),
    methods={"plain": PLAIN, **TABLE_METHODS, **LOSS_METHODS, "mixture": LSTM_MIXTURE},
    seeds=_SEEDS[:3],
)
AWD_LSTM_SMALL = replace(
    AWD_LSTM,
    model="AWD-LSTM, d = 64",
    flags=f"{_awd_lstm(dim=64, hidden=128)} --max-epoch 50",
    recipe={
        **{"dropout": "0.2", "input-dropout": "0.2", "hidden-dropout": "0.1"},
        **{"word-dropout": "0.1", "weight-drop": "0.2", "lr": "30"},
    },
    rounds=(
        (
            {"dropout": "0.1", "input-dropout": "0.1", "hidden-dropout": "0.0"},
            {"dropout": "0.3", "input-dropout": "0.3", "hidden-dropout": "0.2"},
        ),
        ({"lr": "15"}, {"lr": "45"}),
        ({"lr": "7.5"},),
    ),
    methods={
        "plain": PLAIN,
        "weight_norm_init": _with_settings(TABLE_METHODS["weight_norm_init"], 1, 3, 5),
        "weight_norm": _SMALL_WEIGHT_NORM,
    },
    words=150_000,
)
# Does the initialisation's lead last, over a tuned weight decay and with fresh seeds?
AWD_LSTM_DECAY_SMALL = replace(
    AWD_LSTM_SMALL,
    model="AWD-LSTM, d = 64, weight decay",
    recipe={
        **{"dropout": "0.3", "input-dropout": "0.3", "hidden-dropout": "0.2"},
        **{"word-dropout": "0.1", "weight-drop": "0.2", "lr": "15", "weight-decay": "1e-5"},
    },
    rounds=(({"weight-decay": "5e-6"}, {"weight-decay": "2e-5"}),),
    methods={
        "plain": PLAIN,
        "weight_norm_init": replace(
            TABLE_METHODS["weight_norm_init"],
            settings=_each("--weight-norm-init-sigma", 0.3, 0.5, 1),
        ),
    },
    seeds=_FRESH_SEEDS[:5],
)

# Does the lead last, which shrank with every epoch up to the fiftieth? The same flags and seeds, at
# the settings that the study above has chosen, trained anew for twice as many epochs.
AWD_LSTM_DECAY_LONG = replace(
    AWD_LSTM_DECAY_SMALL,
    model="AWD-LSTM, d = 64, weight decay, 100 epochs",
    flags=f"{_awd_lstm(dim=64, hidden=128)} --max-epoch 100",
    rounds=(),
    methods={
        "plain": PLAIN,
        "weight_norm_init": replace(
            TABLE_METHODS["weight_norm_init"], settings=_each("--weight-norm-init-sigma", 1)
        ),
    },
    tuned=False,
)

_ADAM_ROUNDS: Tuple[Tuple[Recipe, ...], ...] = (
    ({"dropout": "0.1"}, {"dropout": "0.3"}, {"dropout": "0.4"}),
    ({"attention-dropout": "0.1"},),
    ({"lr": "0.0005"}, {"lr": "0.002"}),
)
_ADAM_METHODS = {
    "plain": PLAIN,
    **TABLE_METHODS,
    **RENEWED,
    **LOSS_METHODS,
    **COUPLED_ADAM,
    "mixture": MIXTURE,
}


def _transformer_xl(dim: int, layers: int, heads: int, schedule: str) -> str:
    """Flags of a Transformer-XL with one full softmax and a memory of one segment."""
    return (
        f"{_COMMON} {schedule} {_STATEFUL} --decoder-embed-dim {dim} --tokens-per-sample 64 "
        f"--mem-len 64 --decoder-ffn-embed-dim {4 * dim} --decoder-layers {layers} "
        f"--decoder-attention-heads {heads} --adaptive-softmax-cutoff= --optimizer adam "
        "--clip-norm 0.25"
    )


def _transformer_lm(dim: int, layers: int, heads: int, schedule: str) -> str:
    """Flags of a Transformer without a memory, with one width everywhere."""
    return (
        f"{_COMMON} {schedule} --task language_modeling --tokens-per-sample 64 --max-tokens 1280 "
        f"--share-decoder-input-output-embed --decoder-embed-dim {dim} --decoder-input-dim {dim} "
        f"--decoder-output-dim {dim} --decoder-ffn-embed-dim {4 * dim} --decoder-layers {layers} "
        f"--decoder-attention-heads {heads} --optimizer adam --adam-betas (0.9,0.98) "
        "--clip-norm 1.0"
    )


_XL_ARCHS = {
    "plain": "--arch transformer_xl_wt103_small",
    "svd": "--arch transformer_xl_wt103_small --embedding-type svd",
    "weight-norm": "--arch transformer_xl_wt103_small --embedding-type weight-norm",
    "mos": "--arch transformer_xl_wt103_small --output-head mos",
    "sigsoftmax": "--arch transformer_xl_wt103_small --output-head sigsoftmax",
}
# When most of these were trained, the archs of this package had layer norms before each block and
# fairseq's own has them after it. transformer_lm_norms_small compares two of these methods again.
_SC_BEFORE = "--arch transformer_lm_sc --decoder-normalize-before"
_LM_ARCHS = {
    "plain": "--arch transformer_lm",
    "svd": _SC_BEFORE,
    "weight-norm": f"{_SC_BEFORE} --embedding-type weight-norm",
    "mos": "--arch transformer_lm_mos --decoder-normalize-before",
    "sigsoftmax": f"{_SC_BEFORE} --embedding-type plain --output-head sigsoftmax",
}
TRANSFORMER_XL = Study(
    corpus="language_model",
    model="Transformer-XL, d = 128",
    flags=_transformer_xl(dim=128, layers=4, heads=4, schedule=_WITH_PATIENCE),
    archs=_XL_ARCHS,
    recipe={"dropout": "0.2", "attention-dropout": "0", "lr": "0.001"},
    rounds=_ADAM_ROUNDS,
    methods=_ADAM_METHODS,
    seeds=_SEEDS[:3],
)
TRANSFORMER_LM = replace(
    TRANSFORMER_XL,
    model="Transformer language model, d = 128",
    flags=_transformer_lm(dim=128, layers=4, heads=4, schedule=_WITH_PATIENCE),
    archs=_LM_ARCHS,
)
TRANSFORMER_LM_SMALL = Study(
    corpus="language_model",
    model="Transformer language model, d = 64",
    flags=_transformer_lm(dim=64, layers=2, heads=2, schedule=_annealed(2_240)),
    archs=_LM_ARCHS,
    recipe={"dropout": "0.2", "lr": "0.004"},
    rounds=(
        ({"dropout": "0.0"}, {"dropout": "0.1"}, {"dropout": "0.3"}),
        _FINE_RATES,
        ({"lr": "0.0112"}, {"lr": "0.016"}),
    ),
    methods={"plain": PLAIN, **_SMALL_CONTROL, "weight_norm_init": _SMALL_INIT},
    seeds=_SEEDS[:3],
    guessed_updates=2_240,
)
TRANSFORMER_XL_SMALL = replace(
    TRANSFORMER_LM_SMALL,
    model="Transformer-XL, d = 64",
    flags=_transformer_xl(dim=64, layers=2, heads=2, schedule=_annealed(2_240)),
    archs=_XL_ARCHS,
)

# One comparison that transformer_lm_small left open, at the settings chosen there, with seeds that
# have not been used before.
TRANSFORMER_LM_CONFIRMATION = replace(
    TRANSFORMER_LM_SMALL,
    recipe={"dropout": "0.0", "lr": "0.008"},
    rounds=(),
    methods={"plain": PLAIN, "weight_norm_init": _with_settings(_SMALL_INIT, 1)},
    seeds=_FRESH_SEEDS,
)
# Weight-norm regularisation, which gained in translation, beside the same trainings of plain.
TRANSFORMER_LM_METHODS_SMALL = replace(
    TRANSFORMER_LM_CONFIRMATION,
    methods={"plain": PLAIN, "weight_norm": _SMALL_WEIGHT_NORM, "weight_decay": WEIGHT_DECAY},
    plain_of="transformer_lm_confirmation",
)
# The weight-norm methods are compared with a plain recipe whose weight decay is tuned first.
TRANSFORMER_LM_DECAY_SMALL = replace(
    TRANSFORMER_LM_METHODS_SMALL,
    model="Transformer language model, d = 64, weight decay",
    recipe={**TRANSFORMER_LM_METHODS_SMALL.recipe, "weight-decay": "0.2"},
    rounds=(
        ({"weight-decay": "0.05"}, {"weight-decay": "0.5"}, {"weight-decay": "1"}),
        ({"dropout": "0.1"},),
    ),
    methods={"plain": PLAIN, "weight_norm": _SMALL_WEIGHT_NORM, "weight_norm_init": _SMALL_INIT},
    plain_of="",
)
# The initialisation with a weight decay of its own, beside the same trainings of plain.
TRANSFORMER_LM_OWN_DECAY_SMALL = replace(
    TRANSFORMER_LM_DECAY_SMALL,
    recipe={**TRANSFORMER_LM_DECAY_SMALL.recipe, "weight-decay": "0.5"},
    rounds=(),
    methods={
        "plain": PLAIN,
        "weight_norm_init": replace(
            _SMALL_INIT,
            label="weight-norm initialisation, own weight decay",
            flags=f"{_OURS} --weight-norm-init-sigma 0.2",
            settings=_each("--weight-decay", 0.1, 0.2, 0.3),
        ),
    },
    plain_of="transformer_lm_decay_small",
)
# Two table methods again, with plain's layer norms: all trainings are of one processor.
TRANSFORMER_LM_NORMS_SMALL = replace(
    TRANSFORMER_LM_OWN_DECAY_SMALL,
    archs={
        "plain": "--arch transformer_lm",
        "svd": "--arch transformer_lm_sc",
        "weight-norm": "--arch transformer_lm_wn",
    },
    methods={
        "plain": PLAIN,
        "renewed": _SMALL_CONTROL["renewed"],
        "weight_norm_init": replace(
            _SMALL_INIT,
            label="weight-norm initialisation, plain's layer norms",
            flags=f"{_OURS} --weight-norm-init-sigma 0.2",
            settings=_each("--weight-decay", 0.1, 0.2, 0.5),
        ),
    },
    seeds=_FRESH_SEEDS[:5],
    plain_of="",
)
# Methods of the loss and the softmax, beside the same trainings of plain.
TRANSFORMER_LM_LOSSES_SMALL = replace(
    TRANSFORMER_LM_OWN_DECAY_SMALL,
    methods={
        "plain": PLAIN,
        "adversarial": _with_settings(LOSS_METHODS["adversarial"], 1, 3, 5),
        "sigsoftmax": _with_settings(LOSS_METHODS["sigsoftmax"], 2, 3, 4),
        "coupled_adam": _with_settings(COUPLED_ADAM["coupled_adam"], 2, 3, 4),
        "mixture": _with_settings(MIXTURE, 1, 4, 5),
    },
)
TRANSFORMER_XL_METHODS_SMALL = replace(
    TRANSFORMER_XL_SMALL,
    recipe={"dropout": "0.1", "lr": "0.008"},
    rounds=(),
    methods={"plain": PLAIN, "weight_norm": _SMALL_WEIGHT_NORM, "weight_decay": WEIGHT_DECAY},
    plain_of="transformer_xl_small",
)

# Methods that the package had when they were trained -> the last commit that has them.
REMOVED = {
    "sigsoftmax": "4ee876c",
    **dict.fromkeys(("coupled_adam", "gradient_gating", "simcut", "table_rate"), "0bd1da41"),
}
_WEIGHT_DECAY_LATER = (("weight_decay", "plain"),)
_INIT_LATER = (("weight_norm_init", "plain"),)
UNPLANNED: Dict[str, Tuple[Tuple[str, str], ...]] = {
    "transformer_lm_small": _INIT_LATER,
    "transformer_xl_small": _INIT_LATER,
    "awd_lstm_small": (*_INIT_LATER, ("weight_norm", "plain")),
    "translation_methods_small": _WEIGHT_DECAY_LATER,
    "transformer_lm_methods_small": _WEIGHT_DECAY_LATER,
    "transformer_xl_methods_small": _WEIGHT_DECAY_LATER,
    "transformer_lm_norms_small": (("renewed", "plain"),),
    "translation_start_long": (
        *(("short_start", "plain"), ("weight_norm_init", "short_start")),
        *(("log_count_start", "plain"), ("weight_norm_init", "log_count_start")),
    ),
    "translation_muon_small": (("muon_init", "weight_norm_init"),),
    "translation_bfloat16_small": (
        *(("plain_bf16", "plain"), ("weight_norm_init", "plain")),
        *(("init_bf16", "plain"), ("init_bf16", "weight_norm_init")),
    ),
}
_STUDIES: Dict[str, Study] = {
    "translation": TRANSLATION,
    "translation_small": TRANSLATION_SMALL,
    "translation_methods_small": TRANSLATION_METHODS_SMALL,
    "translation_decay_small": TRANSLATION_DECAY_SMALL,
    "translation_start_small": TRANSLATION_START_SMALL,
    "translation_start_long": TRANSLATION_START_LONG,
    "translation_rate_small": TRANSLATION_RATE_SMALL,
    "translation_muon_small": TRANSLATION_MUON_SMALL,
    "translation_muon_long": TRANSLATION_MUON_LONG,
    "translation_bfloat16_small": TRANSLATION_BFLOAT16_SMALL,
    "translation_medium": TRANSLATION_MEDIUM,
    "awd_lstm": AWD_LSTM,
    "awd_lstm_small": AWD_LSTM_SMALL,
    "awd_lstm_decay_small": AWD_LSTM_DECAY_SMALL,
    "awd_lstm_decay_long": AWD_LSTM_DECAY_LONG,
    "transformer_lm": TRANSFORMER_LM,
    "transformer_xl": TRANSFORMER_XL,
    "transformer_lm_small": TRANSFORMER_LM_SMALL,
    "transformer_lm_confirmation": TRANSFORMER_LM_CONFIRMATION,
    "transformer_lm_methods_small": TRANSFORMER_LM_METHODS_SMALL,
    "transformer_lm_decay_small": TRANSFORMER_LM_DECAY_SMALL,
    "transformer_lm_own_decay_small": TRANSFORMER_LM_OWN_DECAY_SMALL,
    "transformer_lm_norms_small": TRANSFORMER_LM_NORMS_SMALL,
    "transformer_lm_losses_small": TRANSFORMER_LM_LOSSES_SMALL,
    "transformer_xl_small": TRANSFORMER_XL_SMALL,
    "transformer_xl_methods_small": TRANSFORMER_XL_METHODS_SMALL,
}
STUDIES: Dict[str, Study] = {
    name: replace(study, unplanned=UNPLANNED.get(name, ())) for name, study in _STUDIES.items()
}
