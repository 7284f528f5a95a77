"""The AWD-LSTM's network against its naive form, and its dropouts and states one by one."""

import pytest
import torch
import torch.nn.functional as F

from spectral_fairseq.embeddings import PlainEmbedding, SVDEmbedding, WeightNormEmbedding
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.activation_penalties import (
    activation_regularization,
    temporal_activation_regularization,
)
from spectral_fairseq.heads import SoftmaxHead
from spectral_fairseq.lm.awd_lstm import AWDLSTM, detached
from tests.reference import awd_lstm as reference

N, D, HIDDEN, B, T = 23, 6, 9, 3, 7
PAD = 1
DROPOUTS = {
    "dropout": 0.4,
    "input_dropout": 0.3,
    "hidden_dropout": 0.25,
    "word_dropout": 0.2,
    "weight_drop": 0.5,
}


def build(table=None, layers=3, last=D, **dropouts):
    torch.manual_seed(5)
    table = table or PlainEmbedding(N, D, PAD)
    return AWDLSTM(table, HIDDEN, last, layers, **dropouts).double()


def batch(seed=0, length=T, streams=B):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, N, (streams, length), generator=generator)


def layers_of(network):
    return [
        (x.lstm.weight_ih_l0, x.lstm.weight_hh_l0, x.lstm.bias_ih_l0, x.lstm.bias_hh_l0)
        for x in network.layers
    ]


@pytest.fixture
def drawn(monkeypatch):
    """Every mask that F.dropout draws, in order, as what it multiplies by."""
    masks = []
    original = F.dropout

    def recording(values, p=0.5, training=True):
        if not training or p == 0:
            return original(values, p, training)
        mask = original(torch.ones_like(values), p, True)
        masks.append(mask)
        return values * mask

    monkeypatch.setattr(F, "dropout", recording)
    return masks


@pytest.mark.parametrize("alpha, beta", [(2.0, 1.0), (0.0, 0.0)])
def test_one_step_equals_the_naive_form(drawn, alpha, beta):
    network = build(**DROPOUTS).train()
    head = SoftmaxHead(network.embed_tokens, bias=True).double()
    torch.nn.init.normal_(head.bias)
    tokens, targets = batch(), batch(seed=1)

    dropped, raw, _ = network(tokens)
    nll = F.cross_entropy(head(dropped).flatten(0, 1), targets.flatten())
    ours = (
        nll
        + alpha * activation_regularization(dropped)
        + beta * temporal_activation_regularization(raw)
    )
    ours.backward()
    gradients = {name: p.grad.clone() for name, p in network.named_parameters()}
    gradients["bias"] = head.bias.grad.clone()
    network.zero_grad()
    head.zero_grad()

    words, inputs, first, between_1, second, between_2, third, output = drawn
    masks = {
        "words": words,
        "input": inputs.squeeze(1),
        "hidden": [between_1.squeeze(0), between_2.squeeze(0)],
        "weights": [first, second, third],
        "output": output.squeeze(1),
    }
    naive = reference.loss(
        tokens,
        targets,
        network.embed_tokens.weight,
        head.bias,
        layers_of(network),
        masks,
        alpha,
        beta,
    )
    torch.testing.assert_close(ours, naive, rtol=1e-10, atol=1e-10)
    naive.backward()
    gradients_of_naive = dict(network.named_parameters())
    for name, gradient in gradients.items():
        other = head.bias if name == "bias" else gradients_of_naive[name]
        if name == "embed_tokens.weight":
            gradient, other_grad = gradient.clone(), other.grad.clone()
            gradient[PAD] = other_grad[PAD] = 0
        else:
            other_grad = other.grad
        torch.testing.assert_close(gradient, other_grad, rtol=1e-8, atol=1e-10, msg=name)


def test_the_tied_table_is_not_masked_for_the_output():
    network = build(word_dropout=0.9).train()
    head = SoftmaxHead(network.embed_tokens).double()
    torch.manual_seed(0)
    dropped, _, _ = network(batch())
    torch.testing.assert_close(head(dropped), F.linear(dropped, network.embed_tokens.weight))


def test_every_word_of_the_batch_learns_without_word_dropout():
    network = build().train()
    tokens = torch.tensor([[N - 1, 2, 3]])
    network(tokens).raw.sum().backward()
    moved = network.embed_tokens.weight.grad.abs().sum(1).nonzero().flatten().tolist()
    assert moved == [2, 3, N - 1]


def test_training_after_evaluation_keeps_one_parameter():
    network = build(**DROPOUTS)
    names = {name for name, _ in network.named_parameters()}
    network.eval()(batch())
    network.train()(batch()).dropped.sum().backward()
    assert {name for name, _ in network.named_parameters()} == names
    assert all(p.grad is not None for p in network.parameters())
    assert set(network.state_dict()) == names


@pytest.mark.parametrize("pieces", [(1,) * T, (3, 4), (6, 1)])
@pytest.mark.parametrize("layers", [1, 3])
def test_pieces_with_carried_state_equal_one_pass(pieces, layers):
    network = build(layers=layers, **DROPOUTS).eval()
    tokens = batch()
    whole = network(tokens).raw
    state, parts = None, []
    for piece in tokens.split(list(pieces), dim=1):
        dropped, raw, state = network(piece, state)
        torch.testing.assert_close(dropped, raw)
        state = detached(state)
        parts.append(raw)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-12)


def test_a_detached_state_ends_the_gradient():
    network = build().train()
    state = network(batch()).state
    assert all(h.requires_grad and c.requires_grad for h, c in state)
    assert not any(h.requires_grad or c.requires_grad for h, c in detached(state))


@pytest.mark.parametrize("last", [D, 11])
@pytest.mark.parametrize("kind", [PlainEmbedding, SVDEmbedding, WeightNormEmbedding])
def test_every_table_and_width(kind, last):
    more = {"counts": list(range(N))} if kind is WeightNormEmbedding else {}
    network = build(kind(N, D, PAD, **more), last=last, **DROPOUTS).train()
    dropped, raw, state = network(batch())
    assert dropped.shape == raw.shape == (B, T, last)
    assert [tuple(h.shape) for h, _ in state] == [(1, B, HIDDEN), (1, B, HIDDEN), (1, B, last)]
    dropped.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in network.parameters() if p.grad is not None)


def test_a_state_of_other_streams_is_refused():
    network = build()
    state = network(batch()).state
    with pytest.raises(ConfigurationError, match="2 streams.*3 streams"):
        network(batch(streams=2), state)
    with pytest.raises(ConfigurationError, match="3 layers"):
        network(batch(), state[:2])


@pytest.mark.parametrize(
    "bad", [{"dropout": 1.0}, {"weight_drop": -0.1}, {"word_dropout": float("nan")}]
)
def test_probabilities_outside_their_range_are_refused(bad):
    with pytest.raises(ConfigurationError, match=">= 0 and < 1"):
        build(**bad)


def test_no_layers_are_refused():
    with pytest.raises(ConfigurationError, match="`layers` to be a whole number >= 1"):
        build(layers=0)
