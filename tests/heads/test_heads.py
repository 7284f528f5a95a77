"""Mixtures and the adaptive softmax: closed forms, tied tables, dropout, TorchScript, rank."""

import pytest
import torch
from torch import nn

from spectral_fairseq.embeddings import TABLES, PlainEmbedding, SVDEmbedding
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.empirical_rank import empirical_rank
from spectral_fairseq.heads import (
    AdaptiveSoftmaxHead,
    MixtureOfContexts,
    MixtureOfSoftmaxes,
    SoftmaxHead,
)
from spectral_fairseq.heads.mixture import mix_scores
from tests.functional.losses import leaves_and_targets
from tests.reference import losses as reference

PAD, WORDS, DIM, FEATURES = 1, 41, 6, 9
CUTOFFS = (7, 9, 30)
HEADS = (MixtureOfSoftmaxes, MixtureOfContexts)
KINDS = {kind.kind: kind for kind in TABLES}
NAIVE = {
    MixtureOfSoftmaxes: reference.log_mixture,
    MixtureOfContexts: reference.log_mixture_of_contexts,
}


def head(cls, table="plain", components=3, **options):
    torch.manual_seed(7)
    table = KINDS[table](WORDS, DIM, PAD)
    if cls is AdaptiveSoftmaxHead:
        built = cls(table, CUTOFFS, init_std=1.0)
    elif cls is SoftmaxHead:
        built = cls(table, **options)
    else:
        built = cls(table, FEATURES, components, **options)
    if isinstance(table, SVDEmbedding):
        nn.init.uniform_(table.sigma, 0.5, 1.5)
        nn.init.normal_(table.V, std=16)
    for name, parameter in built.named_parameters():
        if name in ("bias", "cluster_bias"):
            nn.init.normal_(parameter)
    return built


def batch(width=FEATURES):
    torch.manual_seed(8)
    targets = torch.randint(2, WORDS, (4, 5))
    targets[1, 2:] = PAD
    return torch.randn(4, 5, width), targets


def naive_log_p(module, features):
    if isinstance(module, AdaptiveSoftmaxHead):
        vectors = (module.table.weight, module.bias, module.cluster_weight, module.cluster_bias)
        log_p = reference.log_adaptive_softmax(features.flatten(0, -2), *vectors, module.cutoffs)
        return log_p.view(*features.shape[:-1], WORDS)
    latent = module.context_scale * torch.tanh(module.latent(features))
    contexts = latent.view(*features.shape[:-1], module.components, DIM)
    prior = module.prior(features).log_softmax(-1)
    return NAIVE[type(module)](contexts, prior, module.table.weight, module.bias)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_scores_held_at_once_mix_alike(scale):
    leaves, _ = leaves_and_targets(scale=scale)
    contexts, logits, matrix, bias = [leaf.detach() for leaf in leaves]
    prior = logits.log_softmax(-1)
    scores = torch.nn.functional.linear(contexts, matrix, bias)
    expected = reference.log_mixture(
        contexts.double(), prior.double(), matrix.double(), bias.double()
    )
    found = mix_scores(scores, prior)
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=1e-5)


WAYS = [
    *((cls, way) for cls in HEADS for way in ({}, {"bias": True, "context_scale": 4.0})),
    (AdaptiveSoftmaxHead, {}),
]


@pytest.mark.parametrize("table", KINDS)
@pytest.mark.parametrize("cls, options", WAYS)
def test_forward_is_the_normalised_closed_form(cls, options, table):
    module = head(cls, table, **options).double()
    features = batch(DIM if cls is AdaptiveSoftmaxHead else FEATURES)[0].double()
    found = module(features)
    assert found.shape == (4, 5, WORDS)
    torch.testing.assert_close(found, naive_log_p(module, features))
    torch.testing.assert_close(found.log_softmax(-1), found)


def gradients(loss, leaves):
    for leaf in leaves.values():
        leaf.grad = None
    loss.backward()
    return [leaf.grad for leaf in leaves.values()]


@pytest.mark.parametrize("table", KINDS)
@pytest.mark.parametrize("cls, options", WAYS)
def test_loss_and_every_gradient_equal_the_naive_form(cls, options, table):
    smoothing = 0.1 if options else 0.0
    module = head(cls, table, **options).double()
    features, targets = batch(DIM if cls is AdaptiveSoftmaxHead else FEATURES)
    features = features.double().requires_grad_()
    leaves = dict(module.named_parameters(), features=features)
    loss, _, nll, _ = module.loss(features, targets, smoothing, PAD)
    # Backward rather than autograd.grad, which passes hooks of leaves by in torch < 2.
    found = gradients(loss, leaves)
    expected_loss, expected_nll = reference.smoothed_nll(
        naive_log_p(module, features).flatten(0, -2), targets.flatten(), smoothing, PAD
    )
    expected = gradients(expected_loss, leaves)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(nll, expected_nll)
    assert not nll.requires_grad and not features.grad[targets.eq(PAD)].any()
    for name, ours, theirs in zip(leaves, found, expected):
        if name == "table.U":  # its hook takes the padding row's gradient away, in both
            assert ours[PAD].eq(0).all()
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")


def test_the_table_is_the_embedding_itself():
    table = PlainEmbedding(WORDS, DIM, PAD)
    module, (features, targets) = MixtureOfSoftmaxes(table, FEATURES, 2), batch()
    module.loss(features, targets, 0.0, PAD)[0].backward()
    assert module.table is table
    assert table.weight.grad.norm() > 0
    assert module.prior.bias is None and module.latent.bias is not None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("table", ["plain", "svd"])
@pytest.mark.parametrize("cls", HEADS)
def test_torchscript_gives_the_same(cls, table, bias):
    module = head(cls, table, bias=bias, dropout=0.3, context_scale=2.0).eval()
    features, _ = batch()
    torch.testing.assert_close(torch.jit.script(module)(features), module(features))


def test_dropout_masks_contexts_and_not_the_prior():
    module = head(MixtureOfSoftmaxes, dropout=0.5)
    features = torch.randn(1, 1, FEATURES).expand(200, 1, FEATURES)
    whole = module.eval().contexts(features)
    dropped = module.train().contexts(features)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * whole[kept])
    assert 0.4 < kept.float().mean() < 0.6
    assert not torch.equal(kept[:, :, 0], kept[:, :, 1])  # each expert has its own
    assert not torch.equal(kept[0], kept[1])
    assert torch.equal(module.log_prior(features), module.eval().log_prior(features))


def test_a_locked_mask_holds_along_time_only():
    module = head(MixtureOfSoftmaxes, components=4, dropout=0.5, locked_dim=0)
    kept = module.contexts(torch.randn(50, 3, FEATURES)) != 0  # [time, batch, K, d]
    assert torch.equal(kept, kept[:1].expand_as(kept))
    assert len({tuple(kept[0, b, k].tolist()) for b in range(3) for k in range(4)}) > 6


def test_loss_under_a_locked_mask_is_that_of_the_masked_forward():
    module, (features, targets) = head(MixtureOfSoftmaxes, dropout=0.5, locked_dim=0), batch()
    torch.manual_seed(11)
    loss, *_ = module.loss(features, targets, 0.1, PAD)
    torch.manual_seed(11)
    log_p = module(features).flatten(0, -2)
    expected, _ = reference.smoothed_nll(log_p, targets.flatten(), 0.1, PAD)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("cls", HEADS)
def test_a_batch_of_padding_gives_zero_and_reaches_every_parameter(cls):
    module, (features, targets) = head(cls, dropout=0.2, bias=True), batch()
    loss, *_ = module.loss(features, targets.fill_(PAD), 0.1, PAD)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and p.grad.eq(0).all() for p in module.parameters())


@pytest.mark.parametrize("cls", [*HEADS, SoftmaxHead, AdaptiveSoftmaxHead])
def test_a_loss_that_is_divided_in_place_leaves_the_others(cls):
    losses = head(cls).loss(*batch(FEATURES if cls in HEADS else DIM))
    before = [float(other) for other in losses[1:]]
    losses[0].div_(5)
    assert [float(other) for other in losses[1:]] == before


def test_only_the_mixture_of_softmaxes_exceeds_rank_d():
    """Tables 6 and 7 of the paper in small: log_softmax adds one to the rank of the scores."""
    torch.manual_seed(0)
    features = 3 * torch.randn(60, FEATURES, dtype=torch.float64)

    def rank(cls, components):
        log_p = head(cls, components=components).double()(features).detach()
        return empirical_rank(torch.linalg.svdvals(log_p), *log_p.shape, torch.float64)

    assert rank(MixtureOfContexts, 3) <= DIM + 1
    assert rank(MixtureOfSoftmaxes, 1) <= DIM + 1  # one softmax
    assert rank(MixtureOfSoftmaxes, 3) == WORDS


@pytest.mark.parametrize("cls", HEADS)
def test_impossible_options_are_refused(cls):
    for components in (0, -2):
        with pytest.raises(ConfigurationError, match="`components`"):
            head(cls, components=components)
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigurationError, match="`context_scale`"):
            head(cls, context_scale=scale)
    for dropout in (-0.1, 1.0):
        with pytest.raises(ConfigurationError, match="`dropout`"):
            head(cls, dropout=dropout)


@pytest.mark.parametrize("cls", [*HEADS, AdaptiveSoftmaxHead])
@pytest.mark.parametrize("ignored", [None, PAD])
def test_other_targets_than_states_are_refused(cls, ignored):
    """Where padding is left out, the loss was that of as many states as there were targets."""
    built = head(cls)
    features, targets = batch(DIM if cls is AdaptiveSoftmaxHead else FEATURES)
    for other in (targets[:2], torch.cat([targets, targets])):
        with pytest.raises(ConfigurationError, match="targets. of shape"):
            built.loss(features, other, ignore_index=ignored)


@pytest.mark.parametrize("ignored", [PAD, -100])
@pytest.mark.parametrize("locked", [None, 1])
@pytest.mark.parametrize("cls", [*HEADS, SoftmaxHead])
def test_the_margin_of_what_is_ignored_is_never_looked_up(cls, locked, ignored):
    """A target such as -100, which is no row of a table, ended the adversarial loss."""
    options = {} if cls is SoftmaxHead else {"locked_dim": locked}
    built = head(cls, **options)
    features, targets = batch(DIM if cls is SoftmaxHead else FEATURES)
    marked = targets.masked_fill(targets == PAD, ignored)
    found = built.loss(features, marked, 0.1, ignored, epsilon=0.3)
    counted = targets != PAD
    if locked is None:
        expected = built.loss(features[counted], targets[counted], 0.1, epsilon=0.3)
    else:
        expected = built.loss(features, targets, 0.1, PAD, epsilon=0.3)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("cls", [MixtureOfSoftmaxes, MixtureOfContexts, SoftmaxHead])
def test_the_margin_of_padding_has_a_gradient_where_it_is_a_target(cls):
    """A look-up gives the row of padding none; in a plain table the softmax trains it."""
    built = head(cls).double()
    features, targets = batch(DIM if cls is SoftmaxHead else FEATURES)
    features = features.double()
    with torch.no_grad():
        built.table.weight[PAD].normal_()
    loss = built.loss(features, targets, epsilon=0.3).loss
    found = torch.autograd.grad(loss, built.table.weight)[0][PAD]
    step = torch.zeros_like(built.table.weight)
    step[PAD, 0] = 1e-5
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            built.table.weight.add_(step, alpha=sign)
            losses.append(float(built.loss(features, targets, epsilon=0.3).loss))
            built.table.weight.sub_(step, alpha=sign)
    assert float(found[0]) == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-5)
