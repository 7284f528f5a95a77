"""The Transformer-XL architectures in fairseq: presets, sizes, carry, criterions, generation."""

import logging

import pytest
import torch
from fairseq.models import MODEL_DATACLASS_REGISTRY

from spectral_fairseq.embeddings import PlainEmbedding, SVDEmbedding
from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.heads import AdaptiveSoftmaxHead, MixtureOfSoftmaxes, SoftmaxHead
from spectral_fairseq.lm.awd_lstm import Carry
from spectral_fairseq.plugin.transformer_xl import INIT_STD
from tests.plugin.conftest import build_criterion, build_model
from tests.plugin.stateful_models import beam_search, segments

ARCHS = {"transformer_xl_wt103": 16, "transformer_xl_wt103_small": 4}
WT103 = 267_735
# 151 M is the paper's; the public implementation prints 151107538 for the base model.
PUBLISHED = {"transformer_xl_wt103": 151_107_538, "transformer_xl_wt103_small": 120_307_738}
PAD = 1


def build(task, arch="transformer_xl_wt103_small", **options):
    sizes = {
        "decoder_layers": 2,
        "decoder_head_dim": 6,
        "mem_len": 5,
        "adaptive_softmax_cutoff": "10,20,40",
    }
    if options.get("output_head", "softmax") != "softmax":
        del sizes["adaptive_softmax_cutoff"]
    return build_model(task, arch, **{**sizes, **options})


@pytest.mark.parametrize("arch", ARCHS)
def test_presets_are_the_published_ones(arch):
    config = MODEL_DATACLASS_REGISTRY[arch]()
    assert config.decoder_layers == ARCHS[arch]
    assert (config.decoder_embed_dim, config.decoder_attention_heads) == (410, 10)
    assert (config.decoder_ffn_embed_dim, config.mem_len) == (2100, 150)
    assert (config.dropout, config.attention_dropout) == (0.1, 0.0)
    assert (config.clamp_len, config.same_length) == (0, False)
    assert config.embedding_type == "plain"


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_parameter_counts_are_the_published_ones(task, arch):
    """Counted on a model of full size over few words; each word has d weights and a bias."""
    config = MODEL_DATACLASS_REGISTRY[arch]()
    names = ("embed_dim", "ffn_embed_dim", "layers", "attention_heads", "head_dim")
    sizes = {f"decoder_{name}": getattr(config, f"decoder_{name}") for name in names}
    model = build_model(task, arch, **{**sizes, "adaptive_softmax_cutoff": "10,20,40"})
    assert model.decoder.network.layers[0].attention.head_dim == 41
    count = sum(p.numel() for p in model.parameters())
    assert count + (WT103 - len(task.target_dictionary)) * (410 + 1) == PUBLISHED[arch]


@pytest.mark.parametrize(
    "options, kind",
    [
        ({}, AdaptiveSoftmaxHead),
        ({"adaptive_softmax_cutoff": ""}, SoftmaxHead),
        ({"output_head": "mos", "mixture_components": 3}, MixtureOfSoftmaxes),
    ],
)
@pytest.mark.parametrize("table", ["plain", "svd", "weight-norm"])
def test_segments_with_a_carry_equal_one_pass(task, table, options, kind):
    model = build(task, embedding_type=table, mem_len=9, **options).eval()
    assert isinstance(model.decoder.output_projection, kind)
    assert model.decoder.output_projection.table is model.decoder.network.embed_tokens
    tokens = segments(task)["net_input"]["src_tokens"]
    whole = model(tokens)[0]
    assert whole.shape == (3, 7, len(task.target_dictionary))
    carry, parts = Carry(), []
    for piece in tokens.split([3, 1, 3], dim=1):
        parts.append(model(piece, carry=carry)[0])
        assert not any(t.requires_grad for t in carry.state)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
    carry.reset()
    torch.testing.assert_close(model(tokens, carry=carry)[0], whole)


def test_features_are_what_the_head_takes_in_evaluation(task):
    model = build(task)
    assert model.stateful and model.decoder.stateful
    tokens = segments(task)["net_input"]["src_tokens"]
    scores, extra = model.eval()(tokens)
    torch.testing.assert_close(model.decoder.output_layer(extra["features"]), scores)
    torch.testing.assert_close(model.extract_features(tokens)[0], extra["features"])
    log_p = model.get_normalized_probs((scores, extra), log_probs=True)
    torch.testing.assert_close(log_p, scores)


def test_tables_start_as_the_published_one(task):
    plain = build(task, embedding_type="plain").decoder.network.embed_tokens
    svd = build(task, embedding_type="svd").decoder.network.embed_tokens
    assert isinstance(plain, PlainEmbedding) and isinstance(svd, SVDEmbedding)
    assert plain.weight.std().item() == pytest.approx(INIT_STD, rel=0.15)
    assert plain.weight[PAD].eq(0).all()
    assert svd.weight.norm().item() == pytest.approx(plain.weight.norm().item(), rel=0.15)


@pytest.mark.parametrize("table", ["plain", "svd"])
@pytest.mark.parametrize("training", [True, False])
def test_our_criterions_compute_what_the_stock_one_does(task, table, training):
    """From the clusters hit on one side, from every word's log-probability on the other."""
    model = build(task, embedding_type=table, dropout=0.0).train(training)
    batch = segments(task, pad=2)
    results = []
    for name, options in (("cross_entropy", {}), ("regularized_cross_entropy", {})):
        model.zero_grad()
        loss, size, log = build_criterion(task, name, **options)(model, batch)
        loss.backward() if training else None
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append((loss, size, log["loss"], log["ntokens"], grads))
    for stock, ours in zip(*results):
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)


def test_validation_does_not_compute_every_word(task, monkeypatch):
    model = build(task).eval()
    criterion = build_criterion(task, "mle_cosreg", log_spectrum_interval=1)
    monkeypatch.setattr(AdaptiveSoftmaxHead, "forward", None)
    _, _, log = criterion(model, segments(task))
    assert "table_mean_cosine" in log and "cosine" not in log


def test_every_penalty_works_on_it(task):
    model = build(task, embedding_type="svd").train()
    criterion = build_criterion(
        task,
        "spectrum_control",
        cosreg_weight=1.0,
        weight_norm_weight=1e-3,
        orthogonality_weights="1,1,1,1",
        d_optimal_weight=0.1,
    )
    loss, _, log = criterion(model, segments(task))
    loss.backward()
    assert torch.isfinite(loss)
    assert {"cosine", "spectrum", "orthogonality", "weight_norm", "d_optimal"} <= set(log)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("options", [{}, {"same_length": True, "mem_len": 3}, {"clamp_len": 2}])
def test_beam_search_equals_search_without_incremental_state(task, options):
    model = build(task, seed=3, **options).eval()
    with torch.no_grad():  # far from uniform, so that beams are reordered
        model.decoder.network.embed_tokens.weight *= 40
    found = beam_search(model, task, True)
    assert found == beam_search(model, task, False)
    assert len({tuple(tokens) for beam in found for tokens in beam}) > 2


def test_a_plain_checkpoint_restores_into_an_svd_table(task):
    plain = build(task, embedding_type="plain").eval()
    model = build(task, embedding_type="svd", seed=2).eval()
    model.load_state_dict(plain.state_dict(), strict=True)
    tokens = segments(task)["net_input"]["src_tokens"]
    torch.testing.assert_close(model(tokens)[0], plain(tokens)[0], rtol=1e-4, atol=1e-5)


def test_a_stock_criterion_is_told_what_it_costs(task, caplog):
    with caplog.at_level(logging.WARNING):
        build(task, adaptive_softmax_cutoff="").warn_of_other_criterion("CrossEntropyCriterion")
        assert not caplog.records
        build(task).warn_of_other_criterion("CrossEntropyCriterion")
    assert "--criterion CrossEntropyCriterion computes" in caplog.text
    assert "--criterion regularized_cross_entropy" in caplog.text


def test_a_dictionary_in_another_order_is_warned_of(task, caplog):
    with caplog.at_level(logging.WARNING):
        build(task)
        assert not caplog.records
        task.target_dictionary.count[9] = 3  # 'w5': one word, and no cluster has other work
        task.target_dictionary.count[50] = 400  # of the last cluster
        build(task, adaptive_softmax_cutoff="")
        assert not caplog.records
        build(task)
    assert "falling counts" in caplog.text
    assert "after the first 10 of the dictionary" in caplog.text


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"decoder_head_dim": None, "decoder_attention_heads": 5}, "multiple of"),
        ({"mem_len": -1}, "--mem-len"),
        ({"mem_len": 0, "same_length": True}, "--same-length"),
        ({"adaptive_softmax_cutoff": "20,10"}, "each above the one before"),
        ({"adaptive_softmax_cutoff": "20;10"}, "separated by commas"),
        ({"adaptive_softmax_cutoff": "20,56"}, "below the dictionary's"),
        ({"adaptive_softmax_cutoff": None}, "20000,40000,200000"),
        ({"output_head": "mos", "adaptive_softmax_cutoff": "10"}, "--output-head softmax"),
        ({"dropout": 1.5}, "dropout in"),
    ],
)
def test_flags_that_cannot_be_trained_are_refused(task, flags, words):
    with pytest.raises(ConfigurationError, match=words):
        build(task, **flags)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"label_smoothing": 0.1}, "--label-smoothing 0"),
        ({"adversarial_epsilon": 0.1}, "single logit"),
    ],
)
def test_what_an_adaptive_softmax_cannot_take_is_refused(task, options, words):
    criterion = build_criterion(task, "mle_cosreg", **options)
    model = build(task).train()
    with pytest.raises(ConfigurationError, match=words):
        criterion(model, segments(task))
    with pytest.raises(ConfigurationError, match=words):  # and before the first batch
        criterion.check_model(model)


def test_the_hosts_adaptive_softmax_stays_refused_elsewhere(task):
    with pytest.raises(UnsupportedError, match="--adaptive-softmax-cutoff"):
        build_model(task, "transformer_lm_sc", adaptive_softmax_cutoff="10,20")


def test_a_carry_of_another_number_of_streams_is_refused(task):
    model, carry = build(task), Carry()
    model(segments(task)["net_input"]["src_tokens"], carry=carry)
    with pytest.raises(ConfigurationError, match="2 streams"):
        model(segments(task, bsz=2)["net_input"]["src_tokens"], carry=carry)
