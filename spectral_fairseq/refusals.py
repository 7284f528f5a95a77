"""What cannot be combined, what is needed instead, and the remedy: the one table of refusals.

The checks before training raise its entries, ``spectral-fairseq doctor`` lists them, and the table
in docs/flags.md is generated from them (docs/generator/flags_page.py). The texts quote
flags with backquotes, which only that page keeps. Nothing here imports torch or fairseq.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, Callable, Tuple

from spectral_fairseq.errors import SpectralFairseqError, UnsupportedError


@dataclass(frozen=True)
class Setting:
    """A setting of fairseq with which something of this package cannot be used.

    Attributes:
        flag: as users type it, with its value if only that one is refused.
        path: where fairseq's configuration has it, such as ``common.tpu``.
        refused: whether a value of it is refused.
        after: what the errors say behind the flag, such as ", which scales it".
    """

    flag: str
    path: str
    refused: Callable[[Any], Any] = bool
    after: str = ""

    def found(self, cfg: Any) -> str:
        """The flag and its value if it is refused in a configuration, else nothing."""
        # An older fairseq does not have all of them.
        value = reduce(lambda part, name: getattr(part, name, None), self.path.split("."), cfg)
        if value is None or not self.refused(value):
            return ""
        shown = self.flag if value is True or " " in self.flag else f"{self.flag} {value}"
        return shown + self.after


@dataclass(frozen=True)
class Refusal:
    """One row of the table.

    Attributes:
        feature: what of this package.
        needs: what it needs, behind "expected".
        remedy: what the user should do, as an imperative sentence.
        settings: of fairseq, with which it is refused.
        conflict: what is refused where that cannot be read off a configuration, in words.
    """

    feature: str
    needs: str
    remedy: str
    settings: Tuple[Setting, ...] = ()
    conflict: str = ""

    @property
    def refused(self) -> str:
        """Everything that is refused, for a list."""
        flags = [f"`{setting.flag}`" for setting in self.settings]
        return ", ".join(flags + [self.conflict] * bool(self.conflict))

    def error(self, found: str, feature: str = "") -> SpectralFairseqError:
        """The error that names what was found.

        Args:
            found: the flag, or what the model has.
            feature: the one flag that is concerned, where :attr:`feature` has several.
        """
        expected = f"{self.needs}, for {feature or self.feature}"
        return UnsupportedError(unquoted(expected), found, unquoted(self.remedy))

    def check(self, cfg: Any, feature: str = "") -> None:
        """Refuse a configuration that has any of the settings.

        Args:
            cfg: fairseq's.
            feature: see :meth:`error`.

        Raises:
            UnsupportedError: it has one.
        """
        for setting in self.settings:
            found = setting.found(cfg)
            if found:
                raise self.error(found, feature)


def unquoted(text: str) -> str:
    """A text of the table as a terminal shows it."""
    return text.replace("`", "")


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


FULLY_SHARDED = Setting(
    "--ddp-backend fully_sharded", "distributed_training.ddp_backend", _is("fully_sharded")
)
SLOWMO = Setting("--ddp-backend slowmo", "distributed_training.ddp_backend", _is("slowmo"))
BMUF = Setting("--use-bmuf", "optimization.use_bmuf")
TPU = Setting("--tpu", "common.tpu")
COMPOSITE = Setting("--optimizer composite", "optimizer._name", _is("composite"))


def _zero_sharding(after: str = "") -> Setting:
    path = "distributed_training.zero_sharding"
    return Setting("--zero-sharding", path, lambda value: value != "none", after)


SHARDED = Refusal(
    "a table, head or criterion of this package",
    "every worker to hold the whole table",
    "Use `--ddp-backend pytorch_ddp` or `legacy_ddp`.",
    (FULLY_SHARDED,),
)
# Memory-efficient half precision has no float32 copies of the parameters. An SVD table's sigma
# starts near 1 and the diagonal of its stored V at 16, whose neighbours in bfloat16 are 0.008 and
# 0.125 away, in float16 0.001 and 0.016. A step of Adam is as large as the learning rate: added to
# such a number it rounds to nothing, and the spectrum never moves. Neither do the lengths of a
# weight-norm table, which lie between 1 and 6.
ROUNDED = Refusal(
    "an SVD or weight-norm table",
    "float32 copies of the parameters, whose small steps half precision rounds to nothing",
    "Use `--fp16`, `--bf16` or `--amp`, or another `--embedding-type`.",
    (
        Setting("--memory-efficient-fp16", "common.memory_efficient_fp16"),
        Setting("--memory-efficient-bf16", "common.memory_efficient_bf16"),
    ),
)
OTHER_TABLES = Refusal(
    "a table or head of this package",
    "one table, whose rows are looked up as they are",
    "Drop it, or use `--embedding-type plain --output-head softmax`; `transformer_xl_*` has an "
    "`--adaptive-softmax-cutoff` of its own.",
    (
        Setting("--quant-noise-pq", "model.quant_noise_pq"),
        Setting("--quant-noise-scalar", "model.quant_noise_scalar"),
        Setting("--adaptive-input", "model.adaptive_input"),
        Setting("--character-embeddings", "model.character_embeddings"),
        Setting("--adaptive-softmax-cutoff", "model.adaptive_softmax_cutoff"),
    ),
)
# fairseq's iterative product quantisation puts other modules in the place of layers, at its first
# epoch and between its stages, and builds the optimiser anew each time.
REPLACED_LAYERS = Refusal(
    "a table or head of this package, `--spectrum-decay` or `--table-centering`",
    "a table that stays in the model",
    "Take the table and the output layer out of `layers_to_quantize` in that file, or drop the "
    "flag.",
    conflict="`--quantization-config-path` whose `layers_to_quantize` has the table or the output "
    "layer",
)
REBUILT_OPTIMIZER = Refusal(
    "`--optimizer muon` or `nt_asgd`",
    "an optimiser and matrices that last for the whole training",
    "Use `--optimizer adam`.",
    conflict="`--quantization-config-path`, which replaces matrices and builds the optimiser anew",
)
QUANTISED_SCORES = Refusal(
    "`--loss-form blockwise`, `--adversarial-epsilon` or `--rdrop-weight`",
    "an output layer that computes its scores from its table as it is",
    "Use `--loss-form dense`, or drop the quantisation.",
    (Setting("--quant-noise-scalar", "model.quant_noise_scalar"),),
)
FROZEN = Refusal(
    "a penalty, `--spectrum-decay`, `--table-centering` or `--svd-interval`",
    "a table that is trained",
    "Train the table, or drop the flag.",
    conflict="a frozen table, as with `--decoder-freeze-embed` of `lstm`",
)
ADAPTIVE_SOFTMAX = Refusal(
    "a criterion of this package",
    "an output layer whose log-probabilities have a gradient",
    "Drop `--adaptive-softmax-cutoff`, or use `--criterion adaptive_loss`.",
    conflict="fairseq's adaptive softmax, which is trained by a loss of its own",
)
ADAPTIVE_LOSS = Refusal(
    "a table or head of this package, `transformer_xl_*` or `awd_lstm_*`",
    "a criterion that asks no more of the model than probabilities",
    "Use `--criterion regularized_cross_entropy`, which with an adaptive softmax of this package "
    "computes only the clusters of the targets.",
    conflict="`--criterion adaptive_loss`, which asks for fairseq's own adaptive softmax",
)
_ONE_NORMALISER = (
    "Use `--output-head softmax` or `moc`, of a Transformer-XL with `--adaptive-softmax-cutoff "
    "''`; or drop the flag."
)
_SEVERAL_NORMALISERS = "a mixture of softmaxes or an adaptive softmax"
SOFTCAP = Refusal(
    "`--logit-softcap`",
    "an output layer with one softmax over all words",
    _ONE_NORMALISER,
    conflict=_SEVERAL_NORMALISERS,
)
Z_LOSS = Refusal(
    "`--z-loss`",
    "scores of all words with one normaliser, log Z",
    _ONE_NORMALISER,
    conflict=f"{_SEVERAL_NORMALISERS}; a mixture of contexts "
    "with `--loss-form dense` or `--report-accuracy`, which see its probabilities alone; an output "
    "layer that is not known",
)
SEVERAL_METHODS = Refusal(
    "`--adversarial-epsilon`, `--rdrop-weight` or `--z-loss`",
    "at most one method that changes the likelihood",
    "Keep one.",
    conflict="another method that changes the likelihood",
)
ADVERSARIAL = Refusal(
    "`--adversarial-epsilon`",
    "a softmax or a mixture over all words",
    "Use another `--output-head`, of a Transformer-XL `--adaptive-softmax-cutoff ''`; no "
    "`--logit-softcap`; or drop the flag.",
    conflict="an adaptive softmax or `--logit-softcap`, in which a target's score is "
    "no single logit w'h + b; an output layer that is not known, and a decoder that calls none",
)
CONSISTENCY = Refusal(
    "`--rdrop-weight`",
    "a model that reads each batch on its own",
    "Use a Transformer, or drop the flag.",
    conflict="`awd_lstm_*` or `transformer_xl_*`, whose streams would be read twice",
)
NO_OUTPUT_LAYER = Refusal(
    "`--loss-form blockwise`",
    "a decoder with an output_layer",
    "Use a `transformer`, `transformer_lm` or `lstm` arch, or drop the flag.",
    conflict="a decoder that calls none, such as fairseq's `fconv` and `lightconv`",
)
DENSE_ADVERSARIAL = Refusal(
    "`--adversarial-epsilon`",
    "the loss by blocks of scores, in which the target's logit is lowered",
    "Drop one of them.",
    conflict="`--loss-form dense`",
)
NON_AUTOREGRESSIVE = Refusal(
    "a criterion of this package",
    "a model that predicts the next word from the words before it",
    "Use `--criterion nat_loss`, or a `transformer` arch.",
    conflict="fairseq's non-autoregressive models, such as `levenshtein_transformer`, whose "
    "forward asks for `tgt_tokens`",
)
CONTROL = Refusal(
    "`--spectrum-decay`, `--table-centering` or `--svd-interval`",
    "every worker to hold the whole table, and one learning rate",
    "Remove it; `--ddp-backend legacy_ddp` and `pytorch_ddp` work, and one optimiser.",
    (
        SLOWMO,
        BMUF,
        Setting("--model-parallel-size", "common.model_parallel_size", lambda size: size > 1),
        Setting("--pipeline-model-parallel", "distributed_training.pipeline_model_parallel"),
        TPU,
        COMPOSITE,
    ),
)
RENEWAL_OPTIMIZERS = (
    "adafactor",
    "adagrad",
    "adam",
    "lamb",
    "muon",
    "nag",
    "sgd",
)
RENEWAL = Refusal(
    "`--svd-interval` if it is given (by default it is 0 then)",
    f"one of the optimisers {', '.join(RENEWAL_OPTIMIZERS)}, whose state can be carried over to "
    "other factors, and no averages of factors",
    "Remove it; `spectral-fairseq average` averages tables.",
    (
        Setting("--optimizer", "optimizer._name", lambda name: name not in RENEWAL_OPTIMIZERS),
        Setting("--fp16-adam-stats", "optimizer.fp16_adam_stats", after=", which scales it"),
        _zero_sharding(", which splits it"),
        Setting("--store-ema", "ema.store_ema", after=", which averages factors"),
    ),
)
NT_ASGD = Refusal(
    "`--optimizer nt_asgd`",
    "every worker to hold and step all weights",
    "Remove it; `--ddp-backend legacy_ddp` and `pytorch_ddp` work.",
    (BMUF, FULLY_SHARDED, SLOWMO, _zero_sharding(), TPU),
)
NT_ASGD_DOWNWARDS = Refusal(
    "`--optimizer nt_asgd`",
    "a validation measure that improves downwards",
    "Remove it, and `--best-checkpoint-metric` too unless that is a loss.",
    (Setting("--maximize-best-checkpoint-metric", "checkpoint.maximize_best_checkpoint_metric"),),
)
NT_ASGD_VALIDATION = Refusal(
    "`--optimizer nt_asgd`",
    "a validation loss, which decides when it averages or stops",
    "Remove it; or average at once and never stop, by `--nt-asgd-from-start` without "
    "`--nt-asgd-stop`.",
    (Setting("--disable-validation", "dataset.disable_validation"),),
)
WHOLE_PARAMETERS = Refusal(
    "`--optimizer muon`",
    "whole matrices that are parameters of their own",
    "Add `--fp16-no-flatten-grads` to `--fp16`; use `--ddp-backend legacy_ddp` or `pytorch_ddp`, "
    "without `--zero-sharding`.",
    conflict="`--fp16` with flattened parameters, `--zero-sharding` or sharded parameters, which "
    "have no rows",
)
ONE_OPTIMIZER = Refusal(
    "`--optimizer muon`",
    "one optimiser for all parameters",
    "Use it for all of them, or adam in that group.",
    conflict="`--optimizer composite` with it among its groups",
)
LABEL_SMOOTHING = Refusal(  # raised by heads/adaptive.py, which knows arguments and no flags
    "the adaptive softmax of `transformer_xl_*` with a criterion of this package",
    "no smoothing, which needs the probability of every word",
    "Drop it, or use a full softmax: `--adaptive-softmax-cutoff ''`.",
    conflict="`--label-smoothing`",
)
CHECKPOINT_METRIC = Refusal(
    "`--best-checkpoint-metric table_...`",
    "`--log-spectrum-interval 1`, with which every validation has the measure",
    "Set `--log-spectrum-interval 1`.",
    conflict="another `--log-spectrum-interval`",
)
STREAMS = Refusal(
    "`--task stateful_language_modeling`",
    "streams of whole sentences, each ending in </s>",
    "Leave the flag out, or use `--task language_modeling`.",
    (
        Setting("--add-bos-token", "task.add_bos_token"),
        Setting("--max-target-positions", "task.max_target_positions"),
    ),
)
GENERATE = Refusal(
    "`--task stateful_language_modeling`, which makes pieces of streams",
    "sentences to continue",
    "Give `--task language_modeling --sample-break-mode eos`, which takes the same checkpoints; "
    "`fairseq-interactive` works with either task.",
    conflict="`fairseq-generate`",
)
EVAL_LM = Refusal(
    "`--task stateful_language_modeling`",
    "a program that carries state",
    "Leave `--task` out to score blocks of `--tokens-per-sample` tokens apart; for perplexity with "
    "carried state use `spectral-fairseq evaluate-lm` or `fairseq-validate`.",
    conflict="`fairseq-eval-lm`",
)
SEVERAL_MODELS = Refusal(
    "an arch of this package",
    "a task that trains one model",
    "Use `--arch multilingual_transformer`, with which all criterions of this package work; or "
    "`--task translation_multi_simple_epoch`, which trains one model for all languages.",
    conflict="`--task multilingual_translation` or `semisupervised_translation`, which train one "
    "for each pair of languages",
)
NEW_ROWS = Refusal(
    "a table or head of this package",
    "a task that leaves the table its rows",
    "Use `--embedding-type plain --output-head softmax` without `--logit-softcap`.",
    conflict="`--task online_backtranslation`, which appends rows to the tables of a new model",
)
LANGUAGE_MODEL = Refusal(
    "a language model of this package",
    "a task of language modelling",
    "Use `--task language_modeling`, or `stateful_language_modeling` with `awd_lstm_*` and "
    "`transformer_xl_*`; or a translation model.",
    conflict="`--task translation` or one that is derived from it",
)

REFUSALS: Tuple[Refusal, ...] = tuple(
    value for value in list(vars().values()) if isinstance(value, Refusal)
)
