"""The AWD-LSTM architectures in fairseq: presets, carry, criterions, generation."""

import logging

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.lm.awd_lstm import Carry
from tests.plugin.conftest import build_criterion, build_model
from tests.plugin.stateful_models import beam_search, segments

ARCHS = ("awd_lstm_ptb", "awd_lstm_wt2", "awd_lstm_mos_ptb", "awd_lstm_mos_wt2")
# The public recipes: see docs/papers.md.
PUBLISHED = {
    "awd_lstm_ptb": (400, 1150, None, 0.4, 0.25, "softmax"),
    "awd_lstm_wt2": (400, 1150, None, 0.65, 0.2, "softmax"),
    "awd_lstm_mos_ptb": (280, 960, 620, 0.4, 0.225, "mos"),
    "awd_lstm_mos_wt2": (300, 1150, 650, 0.55, 0.2, "mos"),
}


def build(task, arch="awd_lstm_ptb", **options):
    sizes = {
        "decoder_embed_dim": 16,
        "decoder_hidden_size": 12,
        "decoder_layers": 2,
        "dropout": 0.4,
    }
    if "mos" in arch:
        sizes.update(decoder_last_hidden_size=14, mixture_components=3)
    return build_model(task, arch, **{**sizes, **options})


@pytest.mark.parametrize("arch", ARCHS)
def test_presets_are_the_published_ones(arch):
    from fairseq.models import MODEL_DATACLASS_REGISTRY

    config = MODEL_DATACLASS_REGISTRY[arch]()
    dim, hidden, last, inputs, between, head = PUBLISHED[arch]
    assert config.decoder_embed_dim == dim
    assert config.decoder_hidden_size == hidden
    assert config.decoder_last_hidden_size == last
    assert config.input_dropout == inputs
    assert config.hidden_dropout == between
    assert config.output_head == head
    assert (config.dropout, config.word_dropout, config.weight_drop) == (0.4, 0.1, 0.5)
    assert config.activation_regularization == 2.0
    assert config.temporal_activation_regularization == 1.0
    if head == "mos":
        assert (config.mixture_components, config.mixture_dropout) == (15, 0.29)


@pytest.mark.parametrize(
    "arch, words, millions",
    # 24 M and 33 M are the AWD-LSTM's, 22 M and 35 M those of table 1 and 2 of the MoS paper.
    [
        ("awd_lstm_ptb", 10000, 24.2),
        ("awd_lstm_wt2", 33278, 33.6),
        ("awd_lstm_mos_ptb", 10000, 21.5),
        ("awd_lstm_mos_wt2", 33278, 34.9),
    ],
)
def test_parameter_counts_are_the_published_ones(arch, words, millions):
    from fairseq.models import MODEL_DATACLASS_REGISTRY

    c = MODEL_DATACLASS_REGISTRY[arch]()
    d, h, k = c.decoder_embed_dim, c.decoder_hidden_size, c.mixture_components
    last = c.decoder_last_hidden_size or d
    count = words * (d + 1)
    for a, b in ((d, h), (h, h), (h, last)):
        count += 4 * b * (a + b + 2)
    if c.output_head == "mos":
        count += last * k + (last + 1) * k * d
    assert count / 1e6 == pytest.approx(millions, abs=0.1)


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("arch", ["awd_lstm_ptb", "awd_lstm_mos_ptb"])
def test_the_formula_of_the_count_is_that_of_the_model(task, arch, untied):
    model = build(task, arch, untied_output=untied)
    n, d, h, k = len(task.target_dictionary), 16, 12, 3
    last = 14 if "mos" in arch else d
    count = n * (d + 1) + 4 * h * (d + h + 2) + 4 * last * (h + last + 2)
    if "mos" in arch:
        count += last * k + (last + 1) * k * d
    assert sum(p.numel() for p in model.parameters()) == count + untied * n * d


@pytest.mark.parametrize("arch", ["awd_lstm_ptb", "awd_lstm_mos_ptb"])
@pytest.mark.parametrize("kind", ["plain", "svd", "weight-norm"])
def test_segments_with_a_carry_equal_one_pass(task, arch, kind):
    model = build(task, arch, embedding_type=kind).eval()
    tokens = segments(task)["net_input"]["src_tokens"]
    whole = model(tokens)[0]
    carry, parts = Carry(), []
    for piece in tokens.split([3, 1, 3], dim=1):
        parts.append(model(piece, carry=carry)[0])
        assert not any(t.requires_grad for pair in carry.state for t in pair)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    carry.reset()
    torch.testing.assert_close(model(tokens, carry=carry)[0], whole)


def test_features_are_what_the_head_takes_in_evaluation(task):
    model = build(task)
    tokens = segments(task)["net_input"]["src_tokens"]
    scores, extra = model.eval()(tokens)
    torch.testing.assert_close(model.decoder.output_layer(extra["features"]), scores)
    assert "activation_penalties" not in extra
    torch.testing.assert_close(model.extract_features(tokens)[0], extra["features"])


def test_an_svd_table_starts_with_the_norm_of_the_published_initialisation(task):
    plain = build(task, embedding_type="plain").decoder.output_projection.table.weight
    svd = build(task, embedding_type="svd").decoder.output_projection.table.weight
    assert plain.abs().max() <= 0.1
    assert svd.norm().item() == pytest.approx(plain.norm().item(), rel=0.1)


@pytest.mark.parametrize("form", ["auto", "blockwise"])
@pytest.mark.parametrize("arch", ["awd_lstm_ptb", "awd_lstm_mos_ptb"])
def test_the_criterion_adds_activation_regularisation_in_training_only(task, arch, form):
    model = build(
        task,
        arch,
        dropout=0.0,
        input_dropout=0.0,
        hidden_dropout=0.0,
        word_dropout=0.0,
        weight_drop=0.0,
        mixture_dropout=0.0,
    )
    criterion = build_criterion(task, "regularized_cross_entropy", loss_form=form)
    batch = segments(task, pad=2)
    loss, size, log = criterion(model.train(), batch)
    pure, _, valid_log = criterion(model.eval(), batch)
    features = model(**batch["net_input"])[1]["features"]
    counted = batch["target"].ne(task.target_dictionary.pad())
    ar = features[counted].square().mean()
    changes = (features[:, 1:] - features[:, :-1])[counted[:, 1:]].square().mean()
    torch.testing.assert_close(loss, pure + size * (2.0 * ar + changes), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(log["loss"], pure.detach(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(log["activation"], ar.detach() * size)
    torch.testing.assert_close(log["temporal_activation"], changes.detach() * size)
    assert "activation" not in valid_log


def test_adversarial_softmax_and_every_penalty_work_on_it(task):
    model = build(task, embedding_type="svd").train()
    criterion = build_criterion(
        task,
        "spectrum_control",
        adversarial_epsilon=0.05,
        cosreg_weight=1.0,
        weight_norm_weight=1e-3,
        orthogonality_weights="1,1,1,1",
        d_optimal_weight=0.1,
    )
    loss, _, log = criterion(model, segments(task))
    loss.backward()
    assert torch.isfinite(loss)
    assert {"cosine", "spectrum", "orthogonality", "weight_norm", "d_optimal", "activation"} <= set(
        log
    )
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["awd_lstm_ptb", "awd_lstm_mos_ptb"])
def test_beam_search_equals_search_without_incremental_state(task, arch):
    model = build(task, arch, seed=3).eval()
    assert beam_search(model, task, True) == beam_search(model, task, False)


def test_a_stock_criterion_is_told_what_it_leaves_out(task, caplog):
    off = {"activation_regularization": 0.0, "temporal_activation_regularization": 0.0}
    with caplog.at_level(logging.WARNING):
        build(task, **off).warn_of_other_criterion("CrossEntropyCriterion")
        assert not caplog.records
        build(task).warn_of_other_criterion("CrossEntropyCriterion")
    assert "--criterion CrossEntropyCriterion trains without" in caplog.text
    assert "--criterion regularized_cross_entropy" in caplog.text


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"decoder_last_hidden_size": 14}, "--decoder-last-hidden-size 16"),
        ({"activation_regularization": -1.0}, "--activation-regularization"),
        ({"output_head": "mos", "mixture_components": 0}, "--mixture-components"),
        ({"dropout": 1.5}, "dropout in"),
    ],
)
def test_flags_that_cannot_be_trained_are_refused(task, flags, words):
    with pytest.raises(ConfigurationError, match=words):
        build(task, **flags)


def test_a_carry_of_another_number_of_streams_is_refused(task):
    model, carry = build(task), Carry()
    model(segments(task)["net_input"]["src_tokens"], carry=carry)
    with pytest.raises(ConfigurationError, match="2 streams"):
        model(segments(task, bsz=2)["net_input"]["src_tokens"], carry=carry)
