"""Mixture heads and weight-norm tables inside fairseq's models and our criterions."""

import logging

import pytest
import torch

from spectral_fairseq.embeddings import TABLES
from tests.plugin.conftest import (
    LONGEST_FIRST,
    build_criterion,
    build_host_model,
    build_model,
    gradients,
    make_sample,
    parameters_in_use,
)
from tests.plugin.trainers import build_trainer

KINDS = {kind.kind: kind for kind in TABLES}


def mos(task, arch="transformer_mos", **options):
    return build_model(task, arch, **{"mixture_components": 3, **options})


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
    criterion = build_criterion(task, "regularized_cross_entropy", label_smoothing=0.1)
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


def test_trainer_tells_tables_the_epoch():
    """Without it the schedule of equation 10 would never move."""
    trainer = build_trainer(table="weight-norm", begin=False)
    trainer.begin_epoch(7)
    assert trainer.get_model().decoder.embed_tokens.epoch == 7
