"""The adaptive softmax head over every table: closed form, loss, gradients, refusals."""

import pytest
import torch
from torch import nn

from spectral_fairseq.embeddings import TABLES, PlainEmbedding, SVDEmbedding
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.heads.adaptive import AdaptiveSoftmaxHead
from tests.reference import losses as reference

PAD, WORDS, DIM = 1, 41, 6
CUTOFFS = (7, 9, 30)
KINDS = {kind.kind: kind for kind in TABLES}


def head(table):
    torch.manual_seed(7)
    built = AdaptiveSoftmaxHead(KINDS[table](WORDS, DIM, PAD), CUTOFFS, init_std=1.0)
    if table == "svd":
        nn.init.uniform_(built.table.sigma, 0.5, 1.5)
        nn.init.normal_(built.table.V, std=16)
    nn.init.normal_(built.bias)
    nn.init.normal_(built.cluster_bias)
    return built.double()


def batch():
    torch.manual_seed(8)
    targets = torch.randint(2, WORDS, (4, 5))
    targets[1, 2:] = PAD
    return torch.randn(4, 5, DIM, dtype=torch.float64), targets


def naive(module, features):
    return reference.log_adaptive_softmax(
        features.flatten(0, -2),
        module.table.weight,
        module.bias,
        module.cluster_weight,
        module.cluster_bias,
        module.cutoffs,
    )


@pytest.mark.parametrize("table", KINDS)
def test_forward_is_the_naive_distribution(table):
    module, (features, _) = head(table), batch()
    found = module(features)
    assert found.shape == (4, 5, WORDS)
    torch.testing.assert_close(found.flatten(0, 1), naive(module, features))
    torch.testing.assert_close(found.log_softmax(-1), found)


@pytest.mark.parametrize("table", KINDS)
def test_loss_and_every_gradient_equal_the_naive_form(table):
    module, (features, targets) = head(table), batch()
    features.requires_grad_()
    leaves = dict(module.named_parameters(), features=features)
    loss, _, nll, _ = module.loss(features, targets, 0.0, PAD)
    kept = targets.flatten().ne(PAD)
    log_p = naive(module, features)[kept]
    expected = -log_p.gather(1, targets.flatten()[kept].unsqueeze(1)).sum()
    torch.testing.assert_close(loss, expected)
    assert torch.equal(nll, loss.detach()) and not nll.requires_grad
    found = torch.autograd.grad(loss, list(leaves.values()))
    for name, ours, theirs in zip(leaves, found, torch.autograd.grad(expected, leaves.values())):
        torch.testing.assert_close(ours, theirs, msg=name)
    assert found[-1][1, 2:].eq(0).all()  # padding


def test_a_factored_table_is_not_multiplied_out(monkeypatch):
    module, (features, targets) = head("svd"), batch()

    def built(self):
        raise AssertionError("W was built")

    monkeypatch.setattr(SVDEmbedding, "weight", property(built))
    module(features)
    module.loss(features, targets)[0].backward()


def test_the_same_checkpoint_serves_every_table():
    plain = head("plain")
    svd = AdaptiveSoftmaxHead(SVDEmbedding(WORDS, DIM, PAD), CUTOFFS).double()
    state = {f"head.{key}": value for key, value in plain.state_dict().items()}
    svd.table.upgrade_state_dict_named(state, "head.table")
    svd.load_state_dict({key[len("head.") :]: value for key, value in state.items()})
    features, _ = batch()
    torch.testing.assert_close(svd(features), plain(features), rtol=1e-6, atol=1e-6)


def test_label_smoothing_is_refused():
    module, (features, targets) = head("plain"), batch()
    with pytest.raises(ConfigurationError, match="`label_smoothing` 0"):
        module.loss(features, targets, 0.1, PAD)


def test_cutoffs_beyond_the_table_are_refused():
    with pytest.raises(ConfigurationError, match="below 41"):
        AdaptiveSoftmaxHead(PlainEmbedding(WORDS, DIM, PAD), (20, 41))
