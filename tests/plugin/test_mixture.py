"""Mixture heads and weight-norm tables inside fairseq's models and our criterions."""

import logging

import pytest
import torch
from fairseq.models import ARCH_MODEL_NAME_REGISTRY

from spectral_fairseq.embeddings import TABLES
from spectral_fairseq.errors import DataError, UnsupportedError
from tests.plugin.conftest import (
    LONGEST_FIRST,
    SCRIPTS,
    assert_close,
    build_criterion,
    build_host_model,
    build_model,
    gradients,
    make_sample,
    parameters_in_use,
)
from tests.plugin.trainers import build_trainer
from tests.reference import losses as reference

KINDS = {kind.kind: kind for kind in TABLES}
NOTHING = {"spectrum_weight": 0.0, "orthogonality_weights": "0,0,0,0"}


def mos(task, arch="transformer_mos", **options):
    return build_model(task, arch, **{"mixture_components": 3, **options})


def test_presets_are_registered():
    for suffix in (
        "",
        "_iwslt_de_en",
        "_wmt_en_de",
        "_vaswani_wmt_en_de_big",
        "_wmt_en_de_big_t2t",
    ):
        assert ARCH_MODEL_NAME_REGISTRY[f"transformer_mos{suffix}"] == "transformer_mos"
    assert ARCH_MODEL_NAME_REGISTRY["transformer_lm_mos"] == "transformer_lm_mos"
    assert ARCH_MODEL_NAME_REGISTRY["lstm_mos"] == "lstm_mos"


@pytest.mark.parametrize("head", ["mos", "moc"])
@pytest.mark.parametrize("embedding_type", KINDS)
@pytest.mark.parametrize("sharing", [
    {"share_all_embeddings": True},
    {"share_all_embeddings": False, "share_decoder_input_output_embed": True},
    {"share_all_embeddings": False},
])  # fmt: skip
def test_output_is_a_normalised_log_mixture(task, head, embedding_type, sharing):
    model = mos(task, output_head=head, embedding_type=embedding_type, **sharing).eval()
    assert isinstance(model.decoder.output_projection.table, KINDS[embedding_type])
    scores, _ = model(**make_sample(task)["net_input"])
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.exp().sum(-1), torch.ones(scores.shape[:-1]))
    lprobs = model.get_normalized_probs((scores, None), log_probs=True)
    torch.testing.assert_close(lprobs, scores, rtol=0, atol=1e-5)
    model.train()
    model(**make_sample(task)["net_input"])[0].sum().backward()
    assert all(p.grad is not None for p in parameters_in_use(model).values())


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("head", ["mos", "moc"])
@pytest.mark.parametrize("embedding_type", KINDS)
def test_blockwise_training_loss_equals_the_plain_criterions(
    task, head, embedding_type, label_smoothing
):
    model = mos(task, output_head=head, embedding_type=embedding_type).double().train()
    sample = make_sample(task)
    options = {"label_smoothing": label_smoothing, "ignore_prefix_size": 1}
    ours = build_criterion(task, **NOTHING, **options)
    plain = build_criterion(task, "label_smoothed_cross_entropy", **options)
    results = [criterion(model, sample) for criterion in (ours, plain)]
    for key in ("loss", "nll_loss", "ntokens", "sample_size", "nsentences"):
        torch.testing.assert_close(
            torch.as_tensor(results[0][2][key]).double(),
            torch.as_tensor(results[1][2][key]).double(),
            rtol=1e-6,
            atol=1e-6,
        )
    assert_close(*(gradients(model, r[0]) for r in results), rtol=1e-6, atol=1e-6)


def test_neither_training_nor_evaluation_makes_the_scores(task, monkeypatch):
    model = mos(task).train()
    monkeypatch.setattr(
        type(model.decoder.output_projection), "forward", lambda *_: pytest.fail("scores made")
    )
    for training in (True, False):
        build_criterion(task, **NOTHING)(model.train(training), make_sample(task))
        with pytest.raises(pytest.fail.Exception):
            build_criterion(task, loss_form="dense", **NOTHING)(model, make_sample(task))


@pytest.mark.slow
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_blockwise_softmax_on_ours_and_on_the_hosts(task, label_smoothing):
    models = [
        build_model(task),
        build_host_model(task, "transformer", share_all_embeddings=True),
        build_host_model(task, "transformer"),
        build_host_model(task, "lstm", decoder_out_embed_dim=8),  # its output layer has a bias
    ]
    assert models[-1].decoder.fc_out.bias.abs().max() > 0
    for model in models:
        model.double().train()
        options = {"label_smoothing": label_smoothing, **NOTHING}
        dense = build_criterion(task, loss_form="dense", **options)
        blockwise = build_criterion(task, loss_form="blockwise", **options)
        sample = make_sample(task, sizes=LONGEST_FIRST)
        found, expected = (gradients(model, c(model, sample)[0]) for c in (blockwise, dense))
        assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_accuracy_is_reported_from_the_full_scores(task):
    criterion = build_criterion(task, report_accuracy=True, **NOTHING)
    _, _, log = criterion(mos(task).train(), make_sample(task))
    assert log["total"] == 13


@pytest.mark.parametrize("arch, plain, sharing", [
    ("transformer_mos", "transformer", True),
    ("transformer_mos", "transformer", False),
    ("lstm_mos", "lstm", True),
    ("lstm_mos", "lstm", False),
    ("transformer_mos", "transformer_sc", True),
    ("awd_lstm_mos_ptb", "awd_lstm_ptb", True),
])  # fmt: skip
@pytest.mark.parametrize("embedding_type", ["plain", "svd"])
def test_a_mixture_starts_from_the_table_of_one_softmax(
    task, arch, plain, sharing, embedding_type, caplog
):
    if arch == "awd_lstm_mos_ptb":
        sizes = {"decoder_embed_dim": 16, "decoder_last_hidden_size": 16, "decoder_hidden_size": 12}
    else:
        sizes = {"share_all_embeddings": sharing, "share_decoder_input_output_embed": sharing}
    if "lstm" in arch:
        sizes.update(encoder_hidden_size=16, decoder_hidden_size=16, decoder_out_embed_dim=16)
    if plain in ("transformer", "lstm"):
        single = build_host_model(task, plain, **sizes)
    else:
        single = build_model(task, plain, **{**sizes, "embedding_type": "plain"})
    build = build_host_model if arch == "lstm_mos" else build_model
    options = {"embedding_type": embedding_type, "mixture_components": 3}
    model = build(task, arch, seed=2, **sizes, **options)
    head = model.decoder.output_projection
    before = {name: value.clone() for name, value in head.state_dict().items()}
    with caplog.at_level(logging.WARNING):
        model.load_state_dict(single.state_dict(), strict=True)
    (record,) = caplog.records
    assert "start anew" in record.getMessage()
    for name, value in head.state_dict().items():
        assert name.startswith(("table.", "bias")) or torch.equal(value, before[name])
    state = single.state_dict()
    names = ("output_projection.weight", "output_projection.table.weight", "fc_out.weight")
    table = next((state[f"decoder.{n}"] for n in names if f"decoder.{n}" in state), None)
    table = state["decoder.embed_tokens.weight"] if table is None else table
    torch.testing.assert_close(head.table.weight, table, rtol=1e-4, atol=1e-5)
    damaged = {k: v for k, v in model.state_dict().items() if not k.endswith("latent.bias")}
    with pytest.raises(RuntimeError, match="latent.bias"):
        model.load_state_dict(damaged, strict=True)


def test_one_component_mixtures_agree(task):
    sample = make_sample(task)
    first, second = (
        mos(task, mixture_components=1, output_head=head).eval() for head in ("mos", "moc")
    )
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(
        first(**sample["net_input"])[0], second(**sample["net_input"])[0], rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
@SCRIPTS
def test_torchscript_compiles_and_agrees(task):
    model = mos(task).eval()
    inputs = make_sample(task)["net_input"]
    scripted = torch.jit.script(model)
    actual = scripted(inputs["src_tokens"], inputs["src_lengths"], inputs["prev_output_tokens"])[0]
    torch.testing.assert_close(actual, model(**inputs)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("embedding_type", KINDS)
def test_own_checkpoint_restores_bit_for_bit(task, embedding_type):
    model = mos(task, embedding_type=embedding_type).eval()
    model.load_state_dict(model.state_dict())  # which changes fairseq 0.12.2's rounding
    other = mos(task, embedding_type=embedding_type, seed=2).eval()
    other.load_state_dict(model.state_dict(), strict=True)
    inputs = make_sample(task)["net_input"]
    assert torch.equal(model(**inputs)[0], other(**inputs)[0])


def build_lstm(task, embedding_type, **options):
    return build_host_model(
        task,
        "lstm_mos",
        embedding_type=embedding_type,
        mixture_components=3,
        decoder_out_embed_dim=16,
        **options,
    )


@pytest.mark.parametrize("embedding_type", KINDS)
@pytest.mark.parametrize(
    "sharing", ["share_all_embeddings", "share_decoder_input_output_embed", ""]
)
def test_lstm(task, embedding_type, sharing):
    options = {sharing: True} if sharing else {}
    model = build_lstm(task, embedding_type, dropout=0.0, **options).train()
    sample = make_sample(task, sizes=LONGEST_FIRST)
    tied = model.decoder.output_projection.table is model.decoder.embed_tokens
    assert tied == bool(sharing)
    criterion = build_criterion(task, label_smoothing=0.1, **NOTHING)
    loss, size, _ = criterion(model, sample)
    assert all(torch.isfinite(g).all() for g in gradients(model, loss).values())
    unused = [n for n, p in model.named_parameters() if p.grad is None]
    assert not unused
    model.eval()
    scores = model(**sample["net_input"])[0]
    torch.testing.assert_close(scores.exp().sum(-1), torch.ones(scores.shape[:-1]))


@pytest.mark.parametrize("embedding_type", KINDS)
@pytest.mark.parametrize("sides", ["share_all_embeddings", "encoder", "decoder"])
def test_lstm_takes_pretrained_and_frozen_tables(task, tmp_path, embedding_type, sides):
    weight = torch.randn(len(task.target_dictionary), 16)
    vectors = tmp_path / "vectors.txt"
    rows = zip(task.target_dictionary.symbols, weight.tolist())
    lines = [f"{word} {' '.join(map(repr, row))}" for word, row in rows]
    vectors.write_text("\n".join([f"{len(lines)} 16", *lines]) + "\n", "utf-8")
    side = "encoder" if sides == "share_all_embeddings" else sides
    options = {f"{side}_embed_path": str(vectors), f"{side}_freeze_embed": True}
    options.update({sides: True} if side != sides else {"embedding_tables": "all"})
    model = build_lstm(task, embedding_type, **options)
    table = getattr(model, side).embed_tokens
    assert isinstance(table, KINDS[embedding_type])
    torch.testing.assert_close(table.weight.detach(), weight, rtol=1e-4, atol=1e-5)
    assert not any(p.requires_grad for p in table.parameters())


@pytest.mark.parametrize("embedding_type", ["svd", "weight-norm"])
def test_lstm_starts_from_a_plain_one(task, embedding_type):
    options = {"share_all_embeddings": True, "decoder_out_embed_dim": 16}
    plain = build_host_model(task, "lstm", **options).eval()
    ours = {"embedding_type": embedding_type, "output_head": "softmax"}
    model = build_host_model(task, "lstm_mos", seed=2, **ours, **options).eval()
    model.load_state_dict(plain.state_dict(), strict=True)
    batch = make_sample(task, sizes=LONGEST_FIRST)["net_input"]
    torch.testing.assert_close(model(**batch)[0], plain(**batch)[0], rtol=1e-4, atol=1e-5)
    model.load_state_dict(model.state_dict(), strict=True)


@pytest.mark.parametrize("arch", ["transformer_mos", "transformer_lm_mos", "lstm_mos"])
def test_contexts_are_scaled(task, arch):
    build = build_host_model if arch == "lstm_mos" else build_model
    options = {"mixture_components": 3, "dropout": 0.0}
    plain = build(task, arch, **options).eval().decoder.output_projection
    scaled = build(task, arch, mixture_context_scale=4.0, **options).eval()
    features = torch.randn(2, plain.latent.in_features)
    found = scaled.decoder.output_projection.contexts(features)
    torch.testing.assert_close(found, 4 * plain.contexts(features))


def test_language_model(task):
    model = mos(task, "transformer_lm_mos", share_decoder_input_output_embed=True).eval()
    tokens = make_sample(task)["target"]
    scores, _ = model(tokens)
    torch.testing.assert_close(scores.exp().sum(-1), torch.ones(tokens.shape))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("head", ["mos", "moc"])
@pytest.mark.parametrize("embedding_type", KINDS)
def test_adversarial_mixture_lowers_the_targets_logit_in_each_expert(
    task, head, embedding_type, label_smoothing
):
    model = mos(task, output_head=head, embedding_type=embedding_type).double().train()
    sample, pad = make_sample(task), task.target_dictionary.pad()
    options = {"label_smoothing": label_smoothing, "report_accuracy": True}
    plain = build_criterion(task, "label_smoothed_cross_entropy", **options)
    ours = build_criterion(task, adversarial_epsilon=0.1, **NOTHING, **options)
    loss, _, log = ours(model, sample)
    _, _, plain_log = plain(model, sample)
    for key in ("loss", "nll_loss", "n_correct", "total"):
        found, expected = (torch.as_tensor(each[key]).double() for each in (log, plain_log))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)

    output = model.decoder.output_projection
    features = model(**sample["net_input"], features_only=True)[0].flatten(0, 1)
    contexts, log_prior = output.contexts(features), output.log_prior(features)
    if head == "moc":
        mixed = (log_prior.exp().unsqueeze(-1) * contexts).sum(1, keepdim=True)
        contexts, log_prior = mixed, torch.zeros_like(log_prior[:, :1])
    targets = sample["target"].flatten()
    rows = torch.where(targets == pad, 2, targets)  # the naive form knows no padding
    lowered = reference.adversarial_log_mixture(
        contexts, log_prior, rows, output.table.weight, 0.1, output.bias
    )
    expected, _ = reference.smoothed_nll(lowered, targets, label_smoothing, pad)
    found, wanted = gradients(model, loss), gradients(model, expected)
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-9, atol=0)
    assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_losses_of_single_tokens_of_an_adversarial_mixture_are_refused(task):
    criterion = build_criterion(task, adversarial_epsilon=0.1, **NOTHING)
    with pytest.raises(UnsupportedError, match="--output-head softmax"):
        criterion(mos(task).train(), make_sample(task), reduce=False)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ours", [True, False])
def test_blockwise_adversarial_softmax_equals_that_of_the_full_scores(task, ours, label_smoothing):
    model = build_model(task) if ours else build_host_model(task, "transformer")
    model.double().train()
    options = {"adversarial_epsilon": 0.1, "label_smoothing": label_smoothing, **NOTHING}
    options["ignore_prefix_size"] = 1
    dense = build_criterion(task, **options)
    blockwise = build_criterion(task, loss_form="blockwise", **options)
    (loss, _, log), (other, _, other_log) = (
        c(model, make_sample(task)) for c in (dense, blockwise)
    )
    for key in ("loss", "nll_loss"):
        torch.testing.assert_close(other_log[key], log[key], rtol=1e-6, atol=0, check_dtype=False)
    expected = gradients(model, loss)
    assert_close(gradients(model, other), expected, rtol=1e-6, atol=1e-6)


def test_weight_norm_table_starts_from_the_dictionarys_counts(task):
    model = build_model(task, embedding_type="weight-norm")
    table = model.decoder.embed_tokens
    frequent, rare = (task.target_dictionary.index(w) for w in ("w0", "w44"))
    assert table.g[frequent] > table.g[rare] > 0
    task.target_dictionary.count = [1] * len(task.target_dictionary.count)
    with pytest.raises(DataError, match="fairseq-preprocess"):
        build_model(task, embedding_type="weight-norm")


def test_weight_norm_table_restores_a_plain_checkpoint(task):
    plain = build_host_model(task, "transformer", share_all_embeddings=True).eval()
    model = build_model(task, embedding_type="weight-norm").eval()
    model.load_state_dict(plain.state_dict(), strict=True)
    inputs = make_sample(task)["net_input"]
    torch.testing.assert_close(model(**inputs)[0], plain(**inputs)[0], rtol=1e-4, atol=1e-5)


def test_trainer_tells_tables_the_epoch():
    """Without it the schedule of equation 10 would never move."""
    trainer = build_trainer(table="weight-norm", begin=False)
    trainer.begin_epoch(7)
    assert trainer.get_model().decoder.embed_tokens.epoch == 7
