"""Flags that contradict each other are refused by name, before anything is trained."""

import logging
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.lm.coupled_adam import CoupledAdam
from spectral_fairseq.plugin.cpu import FAIRSEQ_DROPOUT
from spectral_fairseq.plugin.criterion import OPTIONS
from spectral_fairseq.plugin.likelihood import DROPOUT
from spectral_fairseq.plugin.objective import A_PENALTY, AN_SVD_TABLE
from spectral_fairseq.plugin.optimizers import couple_tables
from spectral_fairseq.plugin.penalties import PENALTIES
from spectral_fairseq.plugin.registry import warn_of_idle_options
from tests.plugin.conftest import build_criterion, build_host_model, build_model, make_sample, words
from tests.plugin.trainers import build_trainer

SHARED = {"share_all_embeddings": True}
BUILDERS = {
    "transformer_sc": lambda task, **options: build_model(task, "transformer_sc", **options),
    "lstm_mos": lambda task, **options: build_host_model(task, "lstm_mos", **options),
}


@pytest.mark.parametrize("arch", BUILDERS)
@pytest.mark.parametrize("options, match", [
    ({"encoder_embed_dim": 24}, "--decoder-embed-dim 16 and --encoder-embed-dim 24"),
    ({"decoder_embed_path": "vectors"}, "--decoder-embed-path vectors and --encoder-embed-path"),
])  # fmt: skip
def test_one_table_for_both_sides(task, arch, options, match):
    with pytest.raises(ConfigurationError, match=match):
        BUILDERS[arch](task, **SHARED, **options)


@pytest.mark.parametrize("arch", BUILDERS)
def test_one_table_for_two_dictionaries(task, arch):
    task.target_dictionary = words(30)
    with pytest.raises(ConfigurationError, match="56 words in the source .* 40 others"):
        BUILDERS[arch](task, **SHARED)


def test_a_shared_table_of_another_width_than_the_lstms_output(task):
    with pytest.raises(ConfigurationError, match="--decoder-out-embed-dim 8"):
        build_host_model(
            task, "lstm_mos", decoder_out_embed_dim=8, share_decoder_input_output_embed=True
        )


@pytest.mark.parametrize("arch", ["transformer_sc", "transformer_mos"])
def test_hidden_states_that_nothing_projects(task, arch):
    with pytest.raises(ConfigurationError, match="with --tie-adaptive-weights; found 8 and 16"):
        build_model(task, arch, decoder_output_dim=8, tie_adaptive_weights=True)


@pytest.mark.parametrize("components", [0, 57, 10**12])
def test_more_experts_than_words(task, components):
    with pytest.raises(ConfigurationError, match="--mixture-components from 1 to .*words, 56"):
        build_model(task, "transformer_mos", mixture_components=components)


def test_a_batch_within_the_ignored_prefix_is_said_once(task, caplog):
    with pytest.raises(ConfigurationError, match="--ignore-prefix-size of 0 or more; found -1"):
        build_criterion(task, ignore_prefix_size=-1)
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


@pytest.mark.parametrize("arch", ["transformer_sc", "awd_lstm_wt2", "transformer_xl_wt103_small"])
def test_the_criterion_of_fairseqs_adaptive_softmax_is_refused(task, arch):
    """It ended in an assertion without words, in the first update."""
    table = "svd" if arch == "transformer_sc" else "plain"
    trainer = build_trainer(table=table, begin=False)
    options = {"adaptive_softmax_cutoff": ""} if arch.startswith("transformer_xl") else {}
    trainer._model = build_model(task, arch, embedding_type=table, **options)
    trainer._criterion = AdaptiveLoss(task, sentence_avg=False)
    with pytest.raises(ConfigurationError, match="Use --criterion regularized_cross_entropy"):
        trainer.begin_epoch(1)


NON_AUTOREGRESSIVE = (
    "nonautoregressive_transformer",
    "iterative_nonautoregressive_transformer",
    "levenshtein_transformer",
    "insertion_transformer",
    "cmlm_transformer",
    "nacrf_transformer",
)


@pytest.mark.parametrize("arch", NON_AUTOREGRESSIVE)
@pytest.mark.parametrize("criterion", ["mle_cosreg", "spectrum_control"])
def test_models_that_ask_for_the_targets(task, arch, criterion):
    """The first batch ended in a TypeError: missing 'tgt_tokens'."""
    model = build_host_model(task, arch)
    with pytest.raises(ConfigurationError, match="Transformer.*Use --criterion nat_loss"):
        build_criterion(task, criterion).check_model(model)


@pytest.mark.parametrize("arch", ["awd_lstm_wt2", "transformer_xl_wt103_small"])
def test_only_criterions_of_fairseq_are_told_what_they_leave_out(task, arch, caplog):
    for criterion in (build_criterion(task, "mle_cosreg"), CrossEntropyCriterion(task, False)):
        assert "--criterion" not in caplog.text
        trainer = build_trainer(table="plain", begin=False)
        clusters = {"adaptive_softmax_cutoff": "20,30"} if arch.startswith("transformer_xl") else {}
        trainer._model = build_model(task, arch, embedding_type="plain", **clusters)
        trainer._criterion = criterion
        with caplog.at_level(logging.WARNING, "spectral_fairseq"):
            trainer.begin_epoch(1)
    assert "--criterion CrossEntropyCriterion" in caplog.text


def test_a_cutoff_that_was_not_given_is_not_blamed(task):
    build_host_model(task, "lstm_mos", criterion="adaptive_loss")


@pytest.mark.parametrize("interval", [0, 10])
def test_checkpoints_are_not_chosen_by_a_measure_that_is_missing_at_times(interval):
    """The second validation ended in ``KeyError: 'table_mean_cosine'``."""
    metric = "checkpoint.best_checkpoint_metric=table_mean_cosine"
    with pytest.raises(ConfigurationError, match="for --best-checkpoint-metric table_mean_cosine"):
        build_trainer(metric, log_spectrum_interval=interval)
    build_trainer(metric, log_spectrum_interval=1)
    with pytest.raises(ConfigurationError, match="table_mean_cosine.* found table_cosine"):
        build_trainer(metric.replace("mean_", ""), log_spectrum_interval=1)


@pytest.mark.parametrize("flag", [
    "spectrum_weight",
    "spectral_normalization_weight",
    "d_optimal_weight",
    "normalized_d_optimal_weight",
])  # fmt: skip
@pytest.mark.parametrize("table", ["plain", "weight-norm", "spectral-norm"])
def test_penalties_on_singular_values_need_as_many_words_as_dimensions(task, flag, table):
    sizes = {f"{side}_{part}_dim": 64 for side, part in WIDTHS}
    model = build_model(task, embedding_type=table, **sizes)
    named = "--" + flag.replace("_", "-")
    with pytest.raises(ConfigurationError, match=f"N >= d.*{named}"):
        build_criterion(task, "regularized_cross_entropy", **{flag: 0.1}).check_model(model)


WIDTHS = (("encoder", "embed"), ("decoder", "embed"), ("decoder", "input"), ("decoder", "output"))
TABLE_FLAGS = [
    {"cosreg_weight": 1.0},
    {"spectrum_weight": 0.1},
    {"weight_norm_weight": 0.1},
    {"spectral_normalization_weight": 0.1},
    {"d_optimal_weight": 0.1},
    {"normalized_d_optimal_weight": 0.1},
    {"mean_vector_weight": 0.1},
    {"gradient_gating": 0.02},
]
OFF = {"name": "regularized_cross_entropy"}


def flag_of(flags):
    return "--" + next(iter(flags)).replace("_", "-")


@pytest.mark.parametrize("flags", TABLE_FLAGS, ids=flag_of)
@pytest.mark.parametrize("kind", ["plain", "svd", "weight-norm", "spectral-norm"])
@pytest.mark.parametrize("tied", [True, False])
def test_flags_of_a_table_that_is_not_trained(task, kind, flags, tied):
    """Each refuses a frozen table by its own name, and takes one that is trained."""
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


def test_penalty_on_frozen_factors(task):
    for flags, frozen in (
        ({"spectrum_weight": 0.1}, ("sigma",)),
        ({"orthogonality_weights": "0.1,0,0,0"}, ("U",)),
        ({"orthogonality_weights": "0,0.1,0,0"}, ("V",)),
    ):
        model, criterion = build_model(task), build_criterion(task, **{**OFF, **flags})
        criterion.check_model(model)
        for name in frozen:
            getattr(model.decoder.embed_tokens, name).requires_grad_(False)
        with pytest.raises(ConfigurationError, match=f"trained, for {flag_of(flags)}"):
            criterion.check_model(model)


def test_coupled_adam_without_a_table_to_couple(task):
    model = build_model(task)
    optimizer = SimpleNamespace(optimizer=CoupledAdam(list(model.parameters())))
    couple_tables(optimizer, model)
    model.decoder.embed_tokens.requires_grad_(False)
    with pytest.raises(ConfigurationError, match="trained, for --optimizer coupled_adam"):
        couple_tables(optimizer, model)


@pytest.mark.parametrize("flags, said", [
    ({"weight_norm_target": 3.0}, "--weight-norm-target has no effect without --weight-norm-w"),
    ({"spectrum_c2": 0.1}, "--spectrum-c2 has no effect without --spectrum-weight"),
    ({"penalty_interval": "5"}, "--penalty-interval has no effect without a penalty, such as"),
    ({"simcut_cutoff": 0.1}, "--simcut-cutoff has no effect without --simcut-weight"),
    ({"gradient_gating_memory": 9}, "--gradient-gating-memory has no effect without --gradient-g"),
    ({"rdrop_weight": 1.0}, "--rdrop-weight has no effect without dropout"),
    ({"log_spectrum_interval": 1}, "--log-spectrum-interval measures an output table that is not"),
])  # fmt: skip
def test_flags_without_effect_are_named(task, caplog, flags, said):
    model = build_model(task, embedding_type="plain", dropout=0.0)
    if "log_spectrum_interval" in flags:
        model.requires_grad_(False)
    build_criterion(task, **{**OFF, **flags}).check_model(model)
    assert len(caplog.records) == 1 and caplog.records[0].message.startswith(said)


def test_flags_with_an_effect_are_not_named(task, caplog):
    flags = {"spectrum_c2": 0.1, "weight_norm_weight": 0.1, "weight_norm_target": 3.0}
    flags.update(penalty_interval="5", rdrop_weight=1.0)
    build_criterion(task, **{**OFF, **flags}).check_model(build_model(task, dropout=0.1))
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
