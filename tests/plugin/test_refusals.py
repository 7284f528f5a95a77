"""What cannot be combined or trained is refused by name, before anything is trained."""

import logging
import math
import re
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from spectral_fairseq import refusals
from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.methods.penalties import AN_SVD_TABLE, PENALTIES, required_svd_tables
from spectral_fairseq.plugin.averages import check_configuration
from spectral_fairseq.plugin.checks import WaysOfTraining
from spectral_fairseq.plugin.control_trainer import controls_of
from spectral_fairseq.plugin.criterion import OPTIONS
from spectral_fairseq.plugin.dropout import FAIRSEQ_DROPOUT
from spectral_fairseq.plugin.likelihood import DROPOUT
from spectral_fairseq.plugin.objective import A_PENALTY
from spectral_fairseq.plugin.table_and_head import warn_of_idle_options
from tests.covering import covering
from tests.plugin.conftest import (
    KINDS,
    OUR_MODELS,
    any_model,
    build_criterion,
    build_host_model,
    build_model,
    make_sample,
    segments,
    words,
)
from tests.plugin.trainers import NT_ASGD, OPTIMIZERS, Task, build_trainer, parsed

SHARED = {"share_all_embeddings": True}
OFF = {"name": "regularized_cross_entropy"}
XL, XL_SIZES = OUR_MODELS["xl adaptive"]
STOCK = {"name": "label_smoothed_cross_entropy"}
WIDTHS = (("encoder", "embed"), ("decoder", "embed"), ("decoder", "input"), ("decoder", "output"))
WIDE = {f"{side}_{part}_dim": 64 for side, part in WIDTHS}


def flag_of(flags):
    return "--" + next(iter(flags)).replace("_", "-")


def configuration(setting, *flags):
    """fairseq's configuration with a value of a setting that is refused."""
    values = {"--optimizer": "nt_asgd", "--zero-sharding": "os", "--model-parallel-size": 2}
    value = setting.flag.partition(" ")[2] or values.get(setting.flag, True)
    cfg = parsed(*(("--optimizer", "adafactor") if "relative" in setting.flag else flags))
    if setting.path.startswith("ema") and "ema" not in cfg:
        pytest.skip("this fairseq has no averages of weights")
    return OmegaConf.merge(cfg, OmegaConf.from_dotlist([f"{setting.path}={value}"]))


def begin_training(embedding_type, output_head="softmax", **flags):
    """What begins a training of a configuration; it returns the controls of its tables."""

    def begin(cfg):
        task = Task(words())
        model = build_model(task, embedding_type=embedding_type, output_head=output_head)
        criterion = build_criterion(task, **flags)
        trainer = SimpleNamespace(cfg=cfg, get_model=lambda: model, get_criterion=lambda: criterion)
        WaysOfTraining(trainer).begin_training()
        return controls_of(trainer)

    return begin


def begin_averaging(*overrides):
    return lambda cfg: check_configuration(
        OmegaConf.merge(cfg, OmegaConf.from_dotlist(list(overrides)))
    )


# refusal -> what begins a training that is concerned
FROM_START = "optimizer.nt_asgd_from_start=true"
BEGINNINGS = {
    refusals.CONTROL: [
        begin_training("plain", **OFF, spectrum_decay=0.1),
        begin_training("plain", **OFF, table_centering=0.1),
        begin_training("plain", name="spectrum_control"),
        begin_training("svd", **OFF, svd_interval=1),
    ],
    refusals.RENEWAL: [begin_training("svd", **OFF, svd_interval=1)],
    refusals.SHARDED: [
        begin_training("plain", name="mle_cosreg"),
        begin_training("plain", name="weight_norm"),
        begin_training("svd", **STOCK),
        begin_training("plain", "mos", **STOCK),
    ],
    refusals.ROUNDED: [
        begin_training("svd", name="spectrum_control"),
        begin_training("weight-norm", name="spectrum_control"),
    ],
    refusals.NT_ASGD: [begin_averaging()],
    refusals.NT_ASGD_DOWNWARDS: [begin_averaging()],
    refusals.NT_ASGD_VALIDATION: [
        begin_averaging(),
        begin_averaging(FROM_START, "lr_scheduler.nt_asgd_stop=true"),
    ],
}
# Where the configuration is the same and nothing is refused.
UNCONCERNED = {
    refusals.CONTROL: begin_training("plain", **OFF),
    refusals.RENEWAL: begin_training("svd", **OFF),
    refusals.SHARDED: begin_training("plain", **STOCK),
    refusals.ROUNDED: begin_training("plain", name="spectrum_control"),
    refusals.NT_ASGD_VALIDATION: begin_averaging(FROM_START),
}
CASES = [
    pytest.param(refusal, setting, begin, id=f"{setting.flag} for {refusal.feature}")
    for refusal, beginnings in BEGINNINGS.items()
    for setting in refusal.settings
    for begin in beginnings
]


@pytest.mark.parametrize("refusal, setting, begin", CASES)
def test_a_setting_of_fairseq(refusal, setting, begin):
    flags = NT_ASGD if "nt_asgd" in refusal.feature else OPTIMIZERS["adam"]
    cfg = configuration(setting, *flags)
    with pytest.raises(UnsupportedError) as caught:
        begin(cfg)
    assert caught.value.found.startswith(setting.flag)
    assert caught.value.remedy == refusals.unquoted(refusal.remedy)
    if refusal in UNCONCERNED:
        UNCONCERNED[refusal](configuration(setting, *flags))


@pytest.mark.parametrize("setting", refusals.RENEWAL.settings, ids=lambda one: one.flag)
def test_by_default_factors_are_not_renewed_where_they_cannot_be(setting, caplog):
    with caplog.at_level("INFO"):
        cfg = configuration(setting, *OPTIMIZERS["adam"])
        assert not begin_training("svd", name="spectrum_control")(cfg)
    assert "--svd-interval is 0" in caplog.text and setting.flag in caplog.text


@pytest.mark.parametrize("name", ["sgd", "nag"])
def test_factors_that_would_lose_their_rank_are_renewed_on_request_alone(name, caplog):
    cfg = parsed("--optimizer", name)
    with caplog.at_level("INFO"):
        assert not begin_training("svd", name="spectrum_control")(cfg)
    assert "--svd-interval is 0" in caplog.text and f"--optimizer {name}" in caplog.text
    (control,) = begin_training("svd", name="spectrum_control", svd_interval=5)(cfg)
    assert control.svd_interval == 5


CONFLICTS = [
    (refusals.SEVERAL_METHODS, "svd", {"rdrop_weight": 1.0, "adversarial_epsilon": 1.0},
     "--adversarial-epsilon and --rdrop-weight"),
    *((refusals.SEVERAL_METHODS, "svd", {"z_loss": 1e-4, flag: 0.1}, "and --z-loss")
      for flag in ("adversarial_epsilon", "rdrop_weight")),
    (refusals.ADVERSARIAL, "capped", {"adversarial_epsilon": 0.1}, "--logit-softcap"),
    (refusals.ADVERSARIAL, "xl adaptive", {"adversarial_epsilon": 0.1}, "no single logit"),
    *((refusals.DENSE_ADVERSARIAL, name, {"adversarial_epsilon": 0.1, "loss_form": "dense"},
       "--loss-form dense") for name in ("mos", "svd")),
    *((refusals.CONSISTENCY, name, {"rdrop_weight": 1.0}, "streams would be read twice")
      for name in ("awd-lstm", "xl")),
    (refusals.Z_LOSS, "mos", {"z_loss": 1e-4}, "MixtureOfSoftmaxes"),
    (refusals.Z_LOSS, "moc", {"z_loss": 1e-4, "loss_form": "dense"}, "MixtureOfContexts"),
    (refusals.Z_LOSS, "moc", {"z_loss": 1e-4, "report_accuracy": True}, "MixtureOfContexts"),
    (refusals.NO_OUTPUT_LAYER, "fconv", {"loss_form": "blockwise"}, "FConvDecoder, which has none"),
    (refusals.ADVERSARIAL, "fconv", {"adversarial_epsilon": 0.1}, "calls no output_layer"),
    *((refusals.ADAPTIVE_SOFTMAX, "adaptive softmax", flags, "fairseq's adaptive softmax")
      for flags in ({}, {"adversarial_epsilon": 0.1}, {"rdrop_weight": 1.0})),
]  # fmt: skip
ELSEWHERE = {
    "this file": {"NON_AUTOREGRESSIVE", "SOFTCAP", "OTHER_TABLES", "FROZEN", "CHECKPOINT_METRIC",
                  "LABEL_SMOOTHING"},
    "test_checks.py": {"ADAPTIVE_LOSS", "REPLACED_LAYERS", "REBUILT_OPTIMIZER", "QUANTISED_SCORES"},
    "test_muon.py": {"WHOLE_PARAMETERS", "ONE_OPTIMIZER"},
    "test_stateful_language_modeling.py": {"STREAMS", "GENERATE", "EVAL_LM"},
    "test_other_tasks.py": {"SEVERAL_MODELS", "NEW_ROWS", "LANGUAGE_MODEL"},
}  # fmt: skip


@pytest.mark.parametrize("refusal, model, flags, found", CONFLICTS)
def test_a_conflict(task, refusal, model, flags, found):
    with pytest.raises(UnsupportedError) as caught:
        build_criterion(task, **OFF, **flags).check_model(any_model(task, model))
    error = caught.value
    assert re.search(found, error.found)
    assert error.expected.startswith(refusals.unquoted(refusal.needs))
    assert error.remedy == refusals.unquoted(refusal.remedy)


def test_every_refusal_is_tested():
    here = [*BEGINNINGS, *(row[0] for row in CONFLICTS)]
    names = {name for name, value in vars(refusals).items() if value in here}
    everything = {name for name, one in vars(refusals).items() if one in refusals.REFUSALS}
    assert names.union(*ELSEWHERE.values()) == everything


@pytest.mark.parametrize("flags", [{"z_loss": 1e-4}, {"adversarial_epsilon": 0.1}])
def test_scores_of_an_unknown_output_layer(task, flags):
    model = any_model(task, "transformer shared")
    model.get_normalized_probs = lambda *_, **__: None
    model.decoder.output_projection = torch.nn.Sequential(model.decoder.output_projection)
    with pytest.raises(ConfigurationError, match=f"{flag_of(flags)}; found .* is no plain one"):
        build_criterion(task, **OFF, **flags).check_model(model)


@pytest.mark.parametrize("flags, match", [
    ({"label_smoothing": 0.1}, "--label-smoothing 0"),
    ({"adversarial_epsilon": 0.1}, "single logit"),
])  # fmt: skip
def test_a_batch_of_what_is_refused(task, flags, match):
    """It is refused without a check before, too."""
    criterion = build_criterion(task, **OFF, **flags)
    model = any_model(task, "xl adaptive").train()
    for check in (criterion.check_model, lambda model: criterion(model, segments(task))):
        with pytest.raises(ConfigurationError, match=match):
            check(model)


@pytest.mark.parametrize("arch", [
    "nonautoregressive_transformer", "iterative_nonautoregressive_transformer",
    "levenshtein_transformer", "insertion_transformer", "cmlm_transformer", "nacrf_transformer",
])  # fmt: skip
@pytest.mark.parametrize("criterion", ["mle_cosreg", "spectrum_control"])
def test_models_that_ask_for_the_targets(task, arch, criterion):
    """The first batch ended in a TypeError: missing 'tgt_tokens'."""
    model = build_host_model(task, arch)
    with pytest.raises(ConfigurationError, match="Transformer.*Use --criterion nat_loss"):
        build_criterion(task, criterion).check_model(model)


NUMBERS = ("rdrop_weight", "z_loss", "spectrum_decay")
OUTSIDE = [  # beside those of test_penalties.py
    *(({name: value}, flag_of({name: 0}))
      for name in NUMBERS for value in (-1.0, math.nan, math.inf)),
    ({"ignore_prefix_size": -1}, "--ignore-prefix-size to be a whole number >= 0; found -1"),
    ({"spectrum_decay": 1.5}, "--spectrum-decay to be a finite number >= 0 and <= 1"),
    ({"table_centering": 2.0}, "--table-centering"),
    ({"svd_interval": -1}, "--svd-interval to be a whole number"),
    ({"spectrum_decay": 0.1, "spectrum_slack": 0.9}, "--spectrum-slack"),
    ({"spectrum_decay": 0.1, "spectrum_decay_interval": 0}, "--spectrum-decay-interval"),
    ({"spectrum_decay": 0.1, "spectrum_decay_start": -1}, "--spectrum-decay-start"),
    ({"spectrum_decay": 0.1, "spectrum_c1": "large"}, "--spectrum-c1"),
    ({"spectrum_decay": 0.1, "spectrum_c2": -1.0}, "--spectrum-c2"),
    ({"orthogonality_weights": "0.1,0.1,0.1"}, "four numbers"),
    ({"orthogonality_weights": "0.1,0.1,0,0,0"}, "four numbers"),
    ({"orthogonality_weights": "a,b,c,d"}, "four numbers"),
    ({"orthogonality_weights": "0.1,-1,0,0"}, "--orthogonality-weights"),
    ({"penalty_interval": "0"}, "--penalty-interval"),
    ({"penalty_interval": "often"}, "--penalty-interval"),
]  # fmt: skip


@pytest.mark.parametrize("flags, match", OUTSIDE)
def test_flags_outside_their_range(task, flags, match):
    with pytest.raises(ConfigurationError, match=match):
        build_criterion(task, **OFF, **flags)


UNBUILT = [
    *(("transformer_sc", {name: value}, flag_of({name: value})) for name, value in (
        ("quant_noise_pq", 0.1), ("quant_noise_scalar", 0.1), ("adaptive_input", True),
        ("adaptive_softmax_cutoff", [10, 20]))),
    ("transformer_mos", {"adaptive_softmax_cutoff": [10, 20]}, "--adaptive-softmax-cutoff"),
    ("transformer_lm_sc", {"adaptive_softmax_cutoff": "10,20"}, "--adaptive-softmax-cutoff"),
    ("transformer_sc", WIDE, "N >= d"),
    *(("transformer_sc", {"spectrum_c1": c1}, "--spectrum-c1") for c1 in ("large", "-1", "0")),
    *(("transformer_sc", {"logit_softcap": c}, "--logit-softcap")
      for c in (0.0, -1.0, math.inf, math.nan)),
    ("transformer_mos", {"logit_softcap": 30.0}, "one softmax.*for --logit-softcap; found"),
    *(("transformer_mos", {"mixture_components": k}, "--mixture-components to be .* >= 1 and <= 56")
      for k in (-1, 0, 57, 10**12)),
    ("transformer_lm_sc", {"share_decoder_input_output_embed": True, "decoder_output_dim": 8},
     "--decoder-input-dim"),
    *((arch, {"decoder_output_dim": 8, "tie_adaptive_weights": True},
       "found --decoder-output-dim 8 and --decoder-embed-dim 16.*--tie-adaptive")
      for arch in ("transformer_sc", "transformer_mos")),
    *((arch, {**SHARED, "encoder_embed_dim": 24},
       "--decoder-embed-dim 16 and --encoder-embed-dim 24")
      for arch in ("transformer_sc", "lstm_mos")),
    *((arch, {**SHARED, "decoder_embed_path": "vectors"},
       "--decoder-embed-path vectors and --encoder-embed-path")
      for arch in ("transformer_sc", "lstm_mos")),
    ("lstm_mos", {"decoder_out_embed_dim": 8, "share_decoder_input_output_embed": True},
     "--decoder-out-embed-dim 8"),
    ("awd_lstm_ptb", {"decoder_last_hidden_size": 14},
     "--decoder-last-hidden-size 14 and --decoder-embed-dim 16"),
    ("awd_lstm_ptb", {"activation_regularization": -1.0}, "--activation-regularization"),
    ("awd_lstm_ptb", {"output_head": "mos", "mixture_components": 0}, "--mixture-components"),
    ("awd_lstm_ptb", {"dropout": 1.5}, "--dropout to be .* < 1"),
    *((XL, {**XL_SIZES, **options}, match) for options, match in (
        ({"decoder_attention_heads": 5, "decoder_head_dim": None}, "multiple of"),
        ({"mem_len": -1}, "--mem-len"),
        ({"mem_len": 0, "same_length": True}, "--same-length"),
        ({"adaptive_softmax_cutoff": "20,10"}, "each above the one before"),
        ({"adaptive_softmax_cutoff": "20;10"}, "separated by commas"),
        ({"adaptive_softmax_cutoff": "20,56"}, "below 56"),
        ({"adaptive_softmax_cutoff": None}, "20000,40000,200000"),
        ({"output_head": "mos", "adaptive_softmax_cutoff": "10"}, "--output-head softmax"),
        ({"dropout": 1.5}, "--dropout to be .* < 1"))),
]  # fmt: skip


@pytest.mark.parametrize("arch, options, match", UNBUILT)
def test_a_model_that_cannot_be_built(task, arch, options, match):
    build = build_host_model if arch == "lstm_mos" else build_model
    with pytest.raises(ConfigurationError, match=match):
        build(task, arch, **options)


@pytest.mark.parametrize("build, arch", [
    (build_model, "transformer_sc"), (build_host_model, "lstm_mos"),
])  # fmt: skip
def test_one_table_for_two_dictionaries(task, build, arch):
    task.target_dictionary = words(30)
    match = "one dictionary for --share-all.*found 56 and 40 other words.*--joined-dict"
    with pytest.raises(ConfigurationError, match=match):
        build(task, arch, **SHARED)


OF_EVERY_KIND = [one.weight.name for one in PENALTIES if one.needs is not required_svd_tables]
OF_ONE_KIND = [("plain", "spectrum_decay"), ("plain", "table_centering"), ("svd", "svd_interval")]


OF_KINDS = [*((kind, one) for one in OF_EVERY_KIND for kind in KINDS), *OF_ONE_KIND]


@pytest.mark.parametrize("of, tied", covering(OF_KINDS, (True, False)))
def test_flags_of_a_table_that_is_not_trained(task, of, tied):
    """Each refuses a frozen table by its own name, and takes one that is trained."""
    kind, flag = of
    flags = {flag: 1 if flag == "svd_interval" else 0.1}
    shared = {"share_all_embeddings": tied, "share_decoder_input_output_embed": tied}
    model = build_model(task, embedding_type=kind, **shared)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    build_criterion(task, **{**OFF, **flags}).check_model(model)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    model.decoder.embed_tokens.requires_grad_(False)
    criterion = build_criterion(task, **{**OFF, **flags})
    if not tied:  # the look-up alone is frozen
        criterion.check_model(model)
        model.decoder.output_projection.requires_grad_(False)
    message = f"a table that is trained, for {flag_of(flags)}; found a frozen one"
    with pytest.raises(ConfigurationError, match=message):
        criterion.check_model(model)


@pytest.mark.parametrize("flags, frozen", [
    ({"spectrum_weight": 0.1}, "sigma"),
    ({"orthogonality_weights": "0.1,0,0,0"}, "U"),
    ({"orthogonality_weights": "0,0.1,0,0"}, "V"),
])  # fmt: skip
def test_penalty_on_frozen_factors(task, flags, frozen):
    model, criterion = build_model(task), build_criterion(task, **{**OFF, **flags})
    criterion.check_model(model)
    getattr(model.decoder.embed_tokens, frozen).requires_grad_(False)
    with pytest.raises(ConfigurationError, match=f"trained, for {flag_of(flags)}"):
        criterion.check_model(model)


@pytest.mark.parametrize("model, flags, match", [
    ("svd", {"spectrum_decay": 0.1}, "computed from other parameters"),
    ("weight-norm", {"spectrum_decay": 0.1}, "computed from other parameters"),
    ("plain", {"svd_interval": 10}, "an SVD table for --svd-interval"),
    ("plain", {"orthogonality_weights": "0.1,0,0,0"}, "--embedding-type svd"),
    *(("adaptive softmax", flags, "found fairseq's adaptive softmax") for flags in (
        {"cosreg_weight": 1.0}, {"cosreg_weight": 1.0, "penalty_interval": "3"},
        {"log_spectrum_interval": 10})),
])  # fmt: skip
def test_a_table_of_another_kind(task, model, flags, match):
    criterion = build_criterion(task, **OFF, **flags)
    criterion.num_updates = 1  # an update without a lazy penalty
    with pytest.raises(ConfigurationError, match=match):
        criterion.check_model(any_model(task, model).train())


@pytest.mark.parametrize("table, flags", [
    ("svd", {"spectrum_decay": 0.1}), ("plain", {"orthogonality_weights": "0.1,0.1,0,0"}),
])  # fmt: skip
def test_a_trainer_refuses_before_its_first_epoch(table, flags):
    build_trainer(table=table, **flags, begin=False)
    with pytest.raises(ConfigurationError, match=flag_of(flags)):
        build_trainer(table=table, **flags)


def test_a_model_without_an_output_table(task):
    with pytest.raises(ConfigurationError, match="output table"):
        build_criterion(task, "mle_cosreg").objective_of(torch.nn.Linear(3, 3)).penalties(0)


@pytest.mark.parametrize("model, flag", [
    *((kind, flag) for kind in KINDS if kind != "svd" for flag in (
        "spectrum_weight", "spectral_normalization_weight", "d_optimal_weight",
        "normalized_d_optimal_weight")),
    *((model, "spectrum_decay") for model in ("plain", "transformer shared")),
    ("transformer shared", "spectrum_weight"),
])  # fmt: skip
def test_as_many_words_as_dimensions_are_needed(task, model, flag):
    with pytest.raises(ConfigurationError, match=f"N >= d.*{flag_of({flag: 0})}"):
        build_criterion(task, **OFF, **{flag: 0.1}).check_model(any_model(task, model, **WIDE))


def without_output_table(model):
    model.decoder.output_projection = torch.nn.Identity()
    model.decoder.share_input_output_embed = False


def with_frozen_table(model):
    model.requires_grad_(False)


@pytest.mark.parametrize("kind, options, change", [
    ("plain", {}, without_output_table), ("plain", {}, with_frozen_table),
    ("plain", WIDE, torch.nn.Module.train), ("weight-norm", {}, torch.nn.Module.train),
])  # fmt: skip
def test_a_control_that_no_flag_asks_for_is_named_by_its_criterion(task, kind, options, change):
    model = any_model(task, kind, **options)
    change(model)
    with pytest.raises(ConfigurationError, match="for --criterion spectrum_control; ") as refused:
        build_criterion(task, "spectrum_control").check_model(model)
    assert flag_of({"spectrum_decay": 0}) not in str(refused.value)


@pytest.mark.parametrize("interval", [0, 10])
def test_checkpoints_are_not_chosen_by_a_measure_that_is_missing_at_times(interval):
    """The second validation ended in ``KeyError: 'table_mean_cosine'``."""
    metric = "checkpoint.best_checkpoint_metric=table_mean_cosine"
    with pytest.raises(ConfigurationError, match="for --best-checkpoint-metric table_mean_cosine"):
        build_trainer(metric, log_spectrum_interval=interval)
    build_trainer(metric, log_spectrum_interval=1)
    with pytest.raises(ConfigurationError, match="table_mean_cosine.* found table_cosine"):
        build_trainer(metric.replace("mean_", ""), log_spectrum_interval=1)


def test_a_cutoff_that_was_not_given_is_not_blamed(task):
    build_host_model(task, "lstm_mos", criterion="adaptive_loss")


@pytest.mark.parametrize("flags, said", [
    ({"weight_norm_target": 3.0}, ["--weight-norm-target has no effect without --weight-norm-w"]),
    ({"spectrum_c2": 0.1}, ["--spectrum-c2 has no effect without --spectrum-weight"]),
    ({"penalty_interval": "5"}, ["--penalty-interval has no effect without a penalty, such as"]),
    ({"rdrop_weight": 1.0}, ["--rdrop-weight has no effect without dropout"]),
    ({"log_spectrum_interval": 1}, ["--log-spectrum-interval measures an output table that is"]),
    ({"spectrum_side": "both", "spectrum_decay_start": 10}, [
        "--spectrum-side has no effect without --spectrum-decay",
        "--spectrum-decay-start has no effect without --spectrum-decay or --table-centering"]),
    ({"spectrum_side": "both", "spectrum_decay_start": 10, "table_centering": 0.1},
     ["--spectrum-side has no effect without --spectrum-decay"]),
    ({"spectrum_side": "both", "spectrum_decay_start": 10, "spectrum_decay": 0.1}, []),
    ({"spectrum_c2": 0.1, "spectrum_weight": 0.1, "weight_norm_weight": 0.1,
      "weight_norm_target": 3.0, "penalty_interval": "5"}, []),
])  # fmt: skip
def test_flags_without_effect_are_named(task, caplog, flags, said):
    model = build_model(task, embedding_type="plain", dropout=0.0)
    if "log_spectrum_interval" in flags:
        model.requires_grad_(False)
    build_criterion(task, **{**OFF, **flags}).check_model(model)
    assert len(caplog.records) == len(said)
    assert all(one.message.startswith(text) for one, text in zip(caplog.records, said))


def test_flags_of_an_svd_table_and_of_dropout_have_an_effect(task, caplog):
    flags = {"spectrum_c2": 0.1, "rdrop_weight": 1.0}
    build_criterion(task, **OFF, **flags).check_model(build_model(task, dropout=0.1))
    assert not caplog.records


@pytest.mark.parametrize("options, said", [
    ({"embedding_type": "plain", "embedding_tables": "all"}, ["--embedding-tables"]),
    ({"mixture_components": 3}, ["--mixture-components"]),
    ({"embedding_type": "svd", "weight_norm_init_sigma": 0.3}, ["--weight-norm-init-sigma"]),
    ({"embedding_type": "weight-norm", "weight_norm_init_sigma": 0.3}, []),
    ({"embedding_type": "plain", "spectrum_c2": 0.3}, []),
    ({"output_head": "mos", "mixture_components": 3}, []),
])  # fmt: skip
def test_options_of_other_tables_and_heads_are_named(task, caplog, options, said):
    model = build_model(task)
    warn_of_idle_options(model, Namespace(**options))
    assert [record.message.split()[0] for record in caplog.records] == said


def test_a_setting_of_a_penalty_needs_its_weight_and_every_need_is_known():
    names = {one.name for one in OPTIONS}
    for penalty in PENALTIES:
        assert all(penalty.weight.name in one.needs for one in penalty.settings), penalty.name
    facts = {A_PENALTY, AN_SVD_TABLE, DROPOUT, FAIRSEQ_DROPOUT}
    assert {need for one in OPTIONS for need in one.needs} - names == facts


def test_a_batch_within_the_ignored_prefix_is_said_once(task, caplog):
    model, sample = build_model(task), make_sample(task)
    longest = sample["target"].size(1)
    with caplog.at_level(logging.WARNING):
        build_criterion(task, ignore_prefix_size=longest - 1)(model, sample)
    assert not caplog.records
    criterion = build_criterion(task, ignore_prefix_size=longest)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            _, _, log = criterion(model, sample)
    assert log["nll_loss"] == 0 and len(caplog.records) == 1
    assert f"--ignore-prefix-size is {longest}" in caplog.text
