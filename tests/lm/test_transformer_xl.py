"""Transformer-XL: relative attention, and the network's parity, memory and initialisation."""

import pytest
import torch
import torch.nn.functional as F

from spectral_fairseq.embeddings import PlainEmbedding, SVDEmbedding, WeightNormEmbedding
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.lm.transformer_xl import TransformerXL
from tests.reference import relative_attention as reference

N, D, B, PAD, LAYERS = 23, 6, 3, 1, 2


def build(table=None, layers=LAYERS, **options):
    torch.manual_seed(5)
    table = table or PlainEmbedding(N, D, PAD)
    # So large a deviation that attention is far from uniform.
    options = {"mem_len": 4, "init_std": 0.5, **options}
    return TransformerXL(table, layers, 2, 5, 9, **options).double().eval()


def batch(length, seed=0, streams=B):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, N, (streams, length), generator=generator)


def in_segments(network, tokens, lengths):
    """Features of ``tokens`` fed in segments of these lengths."""
    state, features = None, []
    for segment in tokens.split(lengths, 1):
        found = network(segment, state)
        state = found.state
        features.append(found.raw)
    return torch.cat(features, 1)


@pytest.mark.parametrize("options", [{}, {"clamp_len": 2}, {"same_length": True}])
@pytest.mark.parametrize("table", [PlainEmbedding, SVDEmbedding, WeightNormEmbedding])
def test_equals_the_naive_form_with_memory(table, options):
    network, tokens = build(table(N, D, PAD), **options), batch(9)
    found = in_segments(network, tokens, [6, 3])  # the memory holds 4 of the first 6
    for b in range(B):
        first, inputs = reference.features(network, tokens[b, :6])
        memories = [x[-network.mem_len :] for x in inputs]
        second, _ = reference.features(network, tokens[b, 6:], memories)
        torch.testing.assert_close(found[b], torch.cat([first, second]))


@pytest.mark.parametrize("options", [{}, {"clamp_len": 3}, {"same_length": True}])
@pytest.mark.parametrize("lengths", [[13], [1] * 13, [5, 3, 4, 1], [2, 11]])
def test_as_long_as_nothing_is_forgotten_segments_are_one_text(lengths, options):
    network, tokens = build(mem_len=13, **options), batch(13)
    torch.testing.assert_close(in_segments(network, tokens, lengths), network(tokens).raw)


def test_without_memory_every_segment_starts_afresh():
    network, tokens = build(mem_len=0), batch(6)
    found = in_segments(network, tokens, [3, 3])
    torch.testing.assert_close(found[:, 3:], network(tokens[:, 3:]).raw)
    assert [m.shape for m in network(tokens).state] == [(B, 0, D)] * LAYERS


def test_the_memory_is_detached_and_no_longer_than_asked():
    network = build().train()
    state = network(batch(3)).state
    assert [m.shape for m in state] == [(B, 3, D)] * LAYERS
    state = network(batch(3), state).state
    assert [m.shape for m in state] == [(B, 4, D)] * LAYERS
    assert not any(m.requires_grad for m in state)
    assert all(m.is_contiguous() for m in state)  # not a view of more rows
    network.mem_len = 2  # a memory made with a longer one is cut
    found, latest = network(batch(1), state), network(batch(1), [m[:, -2:] for m in state])
    assert found.state[0].shape == (B, 2, D)
    torch.testing.assert_close(found.raw, latest.raw)


@pytest.mark.parametrize("options", [{}, {"clamp_len": 3}, {"same_length": True}])
def test_steps_of_generation_equal_one_segment(options):
    network, tokens = build(**options), batch(9)
    cache, found = None, []
    for part in tokens.split([3, 1, 1, 4], 1):
        features, cache = network.step(part, cache)
        found.append(features)
    torch.testing.assert_close(torch.cat(found, 1), network(tokens).raw)


def test_dropout_falls_on_embeddings_positions_parts_and_output(monkeypatch):
    drawn = []
    original = F.dropout

    def recording(values, p=0.5, training=True):
        if p:  # attention without torch's fused kernel draws none at 0
            drawn.append((tuple(values.shape), p, training))
        return original(values, p, training)

    monkeypatch.setattr(F, "dropout", recording)
    network = build(dropout=0.3).train()
    found = network(batch(3), network(batch(4)).state)
    assert not torch.equal(found.dropped, found.raw)
    part = [((B, 3, D), 0.3, True), ((B, 3, 9), 0.3, True), ((B, 3, D), 0.3, True)]
    expected = [((B, 3, D), 0.3, True), ((7, D), 0.3, True), *part * LAYERS, part[0]]
    assert drawn[-len(expected) :] == expected


def test_every_parameter_takes_part():
    network = build().train()
    network(batch(3)).dropped.square().sum().backward()
    assert not [name for name, p in network.named_parameters() if p.grad is None]


def test_published_initialisation():
    network = TransformerXL(PlainEmbedding(N, 60, PAD), 3, 5, 12, 200)
    for name, parameter in network.named_parameters():
        if "embed" in name:
            continue
        mean = 1.0 if "norm.weight" in name else 0.0
        if name.endswith(".bias"):
            assert parameter.eq(0).all(), name
        else:
            assert abs(parameter.mean().item() - mean) < 0.01, name
            assert 0.013 < parameter.std().item() < 0.027, name


@pytest.mark.parametrize("options, message", [
    ({"layers": 0}, "`layers`"),
    ({"dropout": 1.0}, "`dropout` to be .* < 1"),
    ({"attention_dropout": -0.1}, "`attention_dropout` to be .* < 1"),
    ({"mem_len": -1}, "`mem_len`"),
    ({"mem_len": 0, "same_length": True}, "`same_length`"),
])  # fmt: skip
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        build(**options)


def test_a_memory_of_other_streams_is_refused():
    network = build()
    with pytest.raises(ConfigurationError, match="3 streams"):
        network(batch(3, streams=2), network(batch(3)).state)
