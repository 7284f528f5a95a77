"""What is checked before training, quantisation among it; checks and logs change nothing."""

import logging

import pytest
import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.quantization_utils import Quantizer, quantize_model_scalar
from omegaconf import OmegaConf

from spectral_fairseq.analysis import analyze
from spectral_fairseq.embeddings import TABLES
from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from tests.plugin.conftest import build_criterion, build_model, make_sample
from tests.plugin.trainers import build_trainer, same_models, save_in_epoch, take_updates

TABLE, LAYERS = r"(en|de)coder\.(embed_tokens|output_projection)", r"decoder\.layers\.\d+\.fc[12]"


def untied(task):
    return build_model(
        task,
        "transformer_sc",
        embedding_type="plain",
        share_all_embeddings=False,
        share_decoder_input_output_embed=False,
    )


def quantised(tmp_path, pattern, max_update=0, tied=True, **options):
    """A trainer before its first epoch, with product quantisation in one stage."""
    trainer = build_trainer(begin=False, **options)
    OmegaConf.set_struct(trainer.cfg, False)
    if not tied:
        trainer._model = untied(trainer.task)
    path, widths = tmp_path / "pq.yaml", {"Linear": "in_features", "Embedding": "embedding_dim"}
    settings = {
        "n_centroids": {kind: {"key": key, "value": {"*": 4}} for kind, key in widths.items()},
        "block_sizes": {kind: {"key": "fuzzy_name", "value": {"*": 4}} for kind in widths},
        "layers_to_quantize": [pattern],
    }
    OmegaConf.save(settings, path)
    trainer.quantizer = Quantizer(str(path), 0 if max_update else 1, max_update)
    trainer.quantizer.set_trainer(trainer)
    return trainer


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("flags", [
    {"spectrum_decay": 0.5},
    {"table_centering": 0.5},
])  # fmt: skip
def test_a_flag_whose_table_is_replaced(tmp_path, tied, flags):
    """The control changed a parameter that the optimiser no longer held, without a word."""
    trainer = quantised(tmp_path, TABLE, tied=tied, **flags)
    trainer.cfg.criterion.update(flags)
    flag = "--" + next(iter(flags)).replace("_", "-")
    with pytest.raises(UnsupportedError, match=f"(?s){flag}.*replaces .*layers_to_quantize"):
        trainer.begin_epoch(1)


@pytest.mark.parametrize("table", ["svd", "weight-norm", "spectral-norm"])
@pytest.mark.parametrize("pattern", [r"(en|de)coder\.embed_tokens", r".*"])
def test_a_table_of_this_package_that_is_replaced(tmp_path, table, pattern):
    """It was a KeyError of fairseq, after the stages before."""
    trainer = quantised(tmp_path, pattern, table=table)
    with pytest.raises(UnsupportedError, match=r"replaces (en|de)coder\.embed_tokens"):
        trainer.begin_epoch(1)


def test_a_layer_of_a_head_that_is_replaced(tmp_path):
    trainer = quantised(tmp_path, r"decoder\.output_projection", arch="transformer_mos")
    with pytest.raises(UnsupportedError, match=r"replaces decoder\.output_projection"):
        trainer.begin_epoch(1)


def test_optimisers_that_hold_what_is_replaced_or_have_to_last(tmp_path):
    for name, pattern, max_update in (
        ("muon", LAYERS, 0),
        ("muon", LAYERS, 2),
        ("nt_asgd", LAYERS, 0),
    ):
        trainer = quantised(tmp_path, pattern, max_update)
        trainer.cfg.optimizer._name = name
        with pytest.raises(UnsupportedError, match=f"--optimizer {name}; found --quantization"):
            trainer.begin_epoch(1)


@pytest.mark.parametrize("flags", [{"spectrum_decay": 0.5}, {"cosreg_weight": 1.0}])
@pytest.mark.parametrize("table", ["plain", "svd"])
def test_other_layers_are_quantised_as_ever(tmp_path, table, flags):
    if table == "svd":
        flags = {"spectrum_weight": 0.1, "svd_interval": 1}
    trainer = quantised(tmp_path, LAYERS, table=table, **flags)
    trainer.begin_epoch(1)
    take_updates(trainer, 2)
    assert type(trainer.get_model().decoder.layers[0].fc1).__name__ == "PQLinear"


@pytest.mark.parametrize("flags, refused", [
    ({"loss_form": "blockwise"}, "--loss-form blockwise"),
    ({"rdrop_weight": 1.0, "loss_form": "blockwise"}, "--rdrop-weight"),
    ({"rdrop_weight": 1.0}, ""),
    ({"adversarial_epsilon": 0.1, "loss_form": "blockwise"}, "--adversarial-epsilon"),
    ({}, ""),
])  # fmt: skip
@pytest.mark.parametrize("is_quantised", [True, False])
def test_scores_beside_an_output_layer_with_quantisation_noise(flags, refused, is_quantised):
    """They were those of the table as it is, so that the noise was lost without a word.

    With tied tables fairseq itself leaves the output layer as it is.
    """
    trainer = build_trainer(begin=False, **flags)
    trainer._model = untied(trainer.task) if is_quantised else trainer.get_model()
    OmegaConf.set_struct(trainer.cfg, False)
    trainer.cfg.model.quant_noise_scalar = 0.1
    quantize_model_scalar(trainer.get_model(), trainer.cfg.model)
    if refused and is_quantised:
        with pytest.raises(UnsupportedError, match=f"{refused}; found --quant-noise-scalar"):
            trainer.begin_epoch(1)
    else:
        trainer.begin_epoch(1)


@pytest.mark.parametrize("arch", [
    "transformer_sc", "transformer_mos", "awd_lstm_wt2", "transformer_xl_wt103_small",
])  # fmt: skip
def test_the_criterion_of_fairseqs_adaptive_softmax_is_refused(task, arch):
    """It ended in an assertion without words, in the first update."""
    table = "svd" if arch == "transformer_sc" else "plain"
    trainer = build_trainer(table=table, begin=False)
    options = {"adaptive_softmax_cutoff": ""} if arch.startswith("transformer_xl") else {}
    trainer._model = build_model(task, arch, embedding_type=table, **options)
    trainer._criterion = AdaptiveLoss(task, sentence_avg=False)
    with pytest.raises(ConfigurationError, match="Use --criterion regularized_cross_entropy"):
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", [table.kind for table in TABLES])
@pytest.mark.parametrize("flags", [
    {},
    {"cosreg_weight": 1.0, "spectrum_weight": 0.01},
    {"adversarial_epsilon": 0.1},
])  # fmt: skip
def test_watching_a_training_changes_nothing(kind, flags, tmp_path):
    """Logs, validation and analysis, and checks at the start of a resumed run."""
    unwatched, watched = (
        build_trainer(table=kind, log_spectrum_interval=interval, **flags) for interval in (0, 1)
    )
    take_updates(unwatched, 4)
    for done in range(1, 5):
        take_updates(watched, 1)
        watched.valid_step(make_sample(watched.task, seed=9))
        analyze(watched.get_model())
        if done == 2:
            save_in_epoch(watched, tmp_path / "c.pt", done)
            watched = build_trainer(table=kind, begin=False, log_spectrum_interval=1, **flags)
            watched.load_checkpoint(str(tmp_path / "c.pt"))
            watched.begin_epoch(1)
    assert same_models(unwatched, watched)


@pytest.mark.parametrize("head", ["mos", "moc"])
def test_the_accuracy_of_a_mixture_shifts_no_mask(task, head):
    model = build_model(task, output_head=head, dropout=0.2, mixture_dropout=0.2).train()
    states = []
    for report in (False, True):
        criterion = build_criterion(
            task, "mle_cosreg", adversarial_epsilon=0.1, report_accuracy=report
        )
        torch.manual_seed(3)
        criterion(model, make_sample(task))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
