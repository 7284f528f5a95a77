"""Flags that contradict each other are refused by name, before anything is trained."""

import logging

import pytest
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.plugin.criterions.penalised import RETIRED
from spectral_fairseq.tools.plugin_flags import flag_sections
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
    with pytest.raises(ConfigurationError, match="Use --criterion mle_cosreg"):
        trainer.begin_epoch(1)


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
    with pytest.raises(ConfigurationError, match="--log-spectrum-interval 1 beside"):
        build_trainer(metric, log_spectrum_interval=interval)
    build_trainer(metric, log_spectrum_interval=1)
    with pytest.raises(ConfigurationError, match="table_mean_cosine.* found table_cosine"):
        build_trainer(metric.replace("mean_", ""), log_spectrum_interval=1)


@pytest.mark.parametrize("flag", RETIRED, ids=lambda flag: flag.name)
def test_a_flag_that_is_gone_does_nothing_at_its_old_default_and_is_refused_otherwise(task, flag):
    build_criterion(task, **{flag.name: flag.default})
    with pytest.raises(ConfigurationError, match=f"{flag.option} to be absent.*removed"):
        build_criterion(task, **{flag.name: 0.5})
    listed = [one.name for flags in flag_sections().values() for one in flags]
    assert "--cosreg-weight" in listed and flag.option not in listed
