"""The AWD-LSTM and Transformer-XL in fairseq: presets, sizes, carry, criterions, generation."""

import logging

import pytest
import torch
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.sequence_generator import SequenceGenerator

from spectral_fairseq.embeddings import PlainEmbedding, SVDEmbedding
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.heads import AdaptiveSoftmaxHead, MixtureOfSoftmaxes, SoftmaxHead
from spectral_fairseq.lm.carry import Carry
from spectral_fairseq.plugin.transformer_xl import INIT_STD
from tests.plugin.conftest import any_model, build_criterion, build_model, segments

PAD = 1
# The public recipes: see docs/papers.md.
AWD_LSTM = {
    "dropout": 0.4, "word_dropout": 0.1, "weight_drop": 0.5, "activation_regularization": 2.0,
    "temporal_activation_regularization": 1.0, "decoder_hidden_size": 1150,
    "decoder_embed_dim": 400, "decoder_last_hidden_size": None, "output_head": "softmax",
}  # fmt: skip
MOS = {**AWD_LSTM, "output_head": "mos", "mixture_components": 15, "mixture_dropout": 0.29}
TRANSFORMER_XL = {
    "decoder_embed_dim": 410, "decoder_attention_heads": 10, "decoder_ffn_embed_dim": 2100,
    "mem_len": 150, "dropout": 0.1, "attention_dropout": 0.0, "clamp_len": 0, "same_length": False,
    "embedding_type": "plain",
}  # fmt: skip
PRESETS = {
    "awd_lstm_ptb": {**AWD_LSTM, "input_dropout": 0.4, "hidden_dropout": 0.25},
    "awd_lstm_wt2": {**AWD_LSTM, "input_dropout": 0.65, "hidden_dropout": 0.2},
    "awd_lstm_mos_ptb": {**MOS, "decoder_embed_dim": 280, "decoder_hidden_size": 960,
                         "decoder_last_hidden_size": 620, "input_dropout": 0.4,
                         "hidden_dropout": 0.225},
    "awd_lstm_mos_wt2": {**MOS, "decoder_embed_dim": 300, "decoder_last_hidden_size": 650,
                         "input_dropout": 0.55, "hidden_dropout": 0.2},
    "transformer_xl_wt103": {**TRANSFORMER_XL, "decoder_layers": 16},
    "transformer_xl_wt103_small": {**TRANSFORMER_XL, "decoder_layers": 4},
}  # fmt: skip
WT103 = 267_735
# Parameters: 151 M is the paper's; the public implementation prints 151107538 for the base model.
XLS = {"transformer_xl_wt103": 151_107_538, "transformer_xl_wt103_small": 120_307_738}
# name -> the kind of its head
MODELS = {
    "awd-lstm": SoftmaxHead,
    "awd-lstm mos": MixtureOfSoftmaxes,
    "xl": SoftmaxHead,
    "xl mos": MixtureOfSoftmaxes,
    "xl adaptive": AdaptiveSoftmaxHead,
}
TWO = ("awd-lstm", "xl adaptive")


@pytest.mark.parametrize("arch", PRESETS)
def test_presets_are_the_published_ones(arch):
    config = MODEL_DATACLASS_REGISTRY[arch]()
    assert {name: getattr(config, name) for name in PRESETS[arch]} == PRESETS[arch]


def lstm_parameters(words, widths, head):
    """Parameters of an AWD-LSTM with a tied table; ``head`` is (K, d) of a mixture."""
    d, last = widths[0], widths[-1]
    layers = sum(4 * b * (a + b + 2) for a, b in zip(widths, widths[1:]))
    components, dim = head or (0, 0)
    return words * (d + 1) + layers + last * components + (last + 1) * components * dim


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
def test_parameter_counts_of_the_lstms_are_the_published_ones(arch, words, millions):
    c = MODEL_DATACLASS_REGISTRY[arch]()
    d, h = c.decoder_embed_dim, c.decoder_hidden_size
    head = (c.mixture_components, d) if c.output_head == "mos" else None
    count = lstm_parameters(words, (d, h, h, c.decoder_last_hidden_size or d), head)
    assert count / 1e6 == pytest.approx(millions, abs=0.1)


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("name", ["awd-lstm", "awd-lstm mos"])
def test_the_formula_of_the_count_is_that_of_the_model(task, name, untied):
    model = any_model(task, name, untied_output=untied)
    n = len(task.target_dictionary)
    widths, head = ((16, 12, 14), (3, 16)) if "mos" in name else ((16, 12, 16), None)
    count = lstm_parameters(n, widths, head)
    assert sum(p.numel() for p in model.parameters()) == count + untied * n * 16


@pytest.mark.slow
@pytest.mark.parametrize("arch", XLS)
def test_parameter_counts_of_the_transformers_are_the_published_ones(task, arch):
    """Counted on a model of full size over few words; each word has d weights and a bias."""
    config = MODEL_DATACLASS_REGISTRY[arch]()
    names = ("embed_dim", "ffn_embed_dim", "layers", "attention_heads", "head_dim")
    sizes = {f"decoder_{name}": getattr(config, f"decoder_{name}") for name in names}
    model = build_model(task, arch, **sizes, adaptive_softmax_cutoff="10,20,40")
    assert model.decoder.network.layers[0].attention.head_dim == 41
    count = sum(p.numel() for p in model.parameters())
    assert count + (WT103 - len(task.target_dictionary)) * (410 + 1) == XLS[arch]


@pytest.mark.parametrize("name", TWO)
def test_tables_start_as_the_published_ones(task, name):
    plain, svd = (
        any_model(task, name, embedding_type=kind).decoder.output_projection.table
        for kind in ("plain", "svd")
    )
    assert isinstance(plain, PlainEmbedding) and isinstance(svd, SVDEmbedding)
    if name == "awd-lstm":
        assert plain.weight.abs().max() <= 0.1
    else:
        assert plain.weight.std().item() == pytest.approx(INIT_STD, rel=0.15)
        assert plain.weight[PAD].eq(0).all()
    error = {"awd-lstm": 0.1, "xl adaptive": 0.15}[name]
    assert svd.weight.norm().item() == pytest.approx(plain.weight.norm().item(), rel=error)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["plain", "svd", "weight-norm"])
def test_segments_with_a_carry_equal_one_pass(task, name, kind):
    more = {"mem_len": 9} if name.startswith("xl") else {}
    model = any_model(task, name, embedding_type=kind, dropout=0.4, **more).eval()
    head = model.decoder.output_projection
    assert isinstance(head, MODELS[name])
    tokens = segments(task)["net_input"]["src_tokens"]
    whole = model(tokens)[0]
    assert whole.shape == (3, 7, len(task.target_dictionary))
    carry, parts = Carry(), []
    for piece in tokens.split([3, 1, 3], dim=1):
        parts.append(model(piece, carry=carry)[0])
        if name.startswith("xl"):
            assert head.table is model.decoder.network.embed_tokens
            assert not any(t.requires_grad for t in carry.state)
        else:
            assert not any(t.requires_grad for pair in carry.state for t in pair)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if name.startswith("xl") else {}
    torch.testing.assert_close(torch.cat(parts, 1), whole, **tolerance)
    carry.reset()
    torch.testing.assert_close(model(tokens, carry=carry)[0], whole)


@pytest.mark.parametrize("name", TWO)
def test_features_are_what_the_head_takes_in_evaluation(task, name):
    model = any_model(task, name)
    assert model.stateful and model.decoder.stateful
    tokens = segments(task)["net_input"]["src_tokens"]
    scores, extra = model.eval()(tokens)
    torch.testing.assert_close(model.decoder.output_layer(extra["features"]), scores)
    assert "activation_penalties" not in extra
    torch.testing.assert_close(model.extract_features(tokens)[0], extra["features"])
    if name == "xl adaptive":
        log_p = model.get_normalized_probs((scores, extra), log_probs=True)
        torch.testing.assert_close(log_p, scores)


@pytest.mark.parametrize("name", TWO)
def test_a_carry_of_another_number_of_streams_is_refused(task, name):
    model, carry = any_model(task, name), Carry()
    model(segments(task)["net_input"]["src_tokens"], carry=carry)
    with pytest.raises(ConfigurationError, match="2 streams"):
        model(segments(task, bsz=2)["net_input"]["src_tokens"], carry=carry)


def test_a_plain_checkpoint_restores_into_an_svd_table(task):
    plain = any_model(task, "xl adaptive", embedding_type="plain").eval()
    model = any_model(task, "xl adaptive", embedding_type="svd", seed=2).eval()
    model.load_state_dict(plain.state_dict(), strict=True)
    tokens = segments(task)["net_input"]["src_tokens"]
    torch.testing.assert_close(model(tokens)[0], plain(tokens)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["auto", "blockwise"])
@pytest.mark.parametrize("name", ["awd-lstm", "awd-lstm mos"])
def test_the_criterion_adds_activation_regularisation_in_training_only(task, name, form):
    model = any_model(task, name)
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


@pytest.mark.parametrize("table", ["plain", "svd"])
@pytest.mark.parametrize("training", [True, False])
def test_our_criterions_compute_what_the_stock_one_does(task, table, training):
    """From the clusters hit on one side, from every word's log-probability on the other."""
    model = any_model(task, "xl adaptive", embedding_type=table, dropout=0.0).train(training)
    batch = segments(task, pad=2)
    results = []
    for name in ("cross_entropy", "regularized_cross_entropy"):
        model.zero_grad()
        loss, size, log = build_criterion(task, name)(model, batch)
        loss.backward() if training else None
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append((loss, size, log["loss"], log["ntokens"], grads))
    for stock, ours in zip(*results):
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)


def test_validation_does_not_compute_every_word(task, monkeypatch):
    model = any_model(task, "xl adaptive").eval()
    criterion = build_criterion(task, "mle_cosreg", log_spectrum_interval=1)
    monkeypatch.setattr(AdaptiveSoftmaxHead, "forward", None)
    _, _, log = criterion(model, segments(task))
    assert "table_mean_cosine" in log and "cosine" not in log


@pytest.mark.parametrize("name, more, logged", [
    ("awd-lstm", {"adversarial_epsilon": 0.05}, {"activation"}), ("xl adaptive", {}, set()),
])  # fmt: skip
def test_every_penalty_works_on_it(task, name, more, logged):
    model = any_model(task, name, embedding_type="svd").train()
    criterion = build_criterion(
        task,
        "spectrum_control",
        cosreg_weight=1.0,
        weight_norm_weight=1e-3,
        orthogonality_weights="1,1,1,1",
        d_optimal_weight=0.1,
        **more,
    )
    loss, _, log = criterion(model, segments(task))
    loss.backward()
    assert torch.isfinite(loss)
    terms = {"cosine", "spectrum", "orthogonality", "weight_norm", "d_optimal"}
    assert terms | logged <= set(log)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("name, off, says", [
    ("awd-lstm", {"activation_regularization": 0.0, "temporal_activation_regularization": 0.0},
     "trains without"),
    ("xl adaptive", {"adaptive_softmax_cutoff": ""}, "computes"),
])  # fmt: skip
def test_a_stock_criterion_is_told_what_it_leaves_out_or_costs(task, name, off, says, caplog):
    with caplog.at_level(logging.WARNING):
        any_model(task, name, **off).warn_of_other_criterion("CrossEntropyCriterion")
        assert not caplog.records
        any_model(task, name).warn_of_other_criterion("CrossEntropyCriterion")
    assert f"--criterion CrossEntropyCriterion {says}" in caplog.text
    assert "--criterion regularized_cross_entropy" in caplog.text


def test_a_dictionary_in_another_order_is_warned_of(task, caplog):
    with caplog.at_level(logging.WARNING):
        any_model(task, "xl adaptive")
        assert not caplog.records
        task.target_dictionary.count[9] = 3  # 'w5': one word, and no cluster has other work
        task.target_dictionary.count[50] = 400  # of the last cluster
        any_model(task, "xl")
        assert not caplog.records
        any_model(task, "xl adaptive")
    assert "falling counts" in caplog.text
    assert "after the first 10 of the dictionary" in caplog.text


def beam_search(model, task, stateful):
    """Tokens of the hypotheses after two prefixes, with or without incremental state."""
    source = {"net_input": {"src_tokens": torch.tensor([[2, 7, 9], [2, 11, 5]])}}
    prefix = source["net_input"]["src_tokens"][:, 1:]
    generator = SequenceGenerator(
        [model], task.target_dictionary, beam_size=3, max_len_b=8, min_len=4
    )
    if not stateful:
        generator.model.has_incremental = False
    finals = generator.forward(source, prefix_tokens=prefix, bos_token=2)
    return [[hypothesis["tokens"].tolist() for hypothesis in beam] for beam in finals]


@pytest.mark.slow
@pytest.mark.parametrize("name, options", [
    ("awd-lstm", {}), ("awd-lstm mos", {}), ("xl adaptive", {}),
    ("xl adaptive", {"same_length": True, "mem_len": 3}),
    ("xl adaptive", {"clamp_len": 2}),
])  # fmt: skip
def test_beam_search_equals_search_without_incremental_state(task, name, options):
    model = any_model(task, name, seed=3, **options).eval()
    if name == "xl adaptive":
        with torch.no_grad():  # far from uniform, so that beams are reordered
            model.decoder.network.embed_tokens.weight *= 40
    found = beam_search(model, task, True)
    assert found == beam_search(model, task, False)
    assert name != "xl adaptive" or len({tuple(tokens) for beam in found for tokens in beam}) > 2
