"""Mixtures, the z-loss and the soft cap of models that exist."""

import copy

import pytest
import torch
import torch.nn.functional as F

from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.training import (
    TokenLoss,
    fused_loss_,
    mixture_,
    plain_,
)
from tests.reference import losses as reference
from tests.training.models import (
    DIM,
    IDS,
    LABELS,
    LLAMA,
    TABLES,
    Straight,
    build,
    check_loss,
    each_table,
    gradients,
    inputs,
    made,
    same,
)


def gemma(transformers, name="Gemma2", cap=1.5):
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"this transformers has no {name}")
    settings = {**LLAMA, "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 8}
    settings.update(pad_token_id=0, final_logit_softcapping=cap)
    return made(transformers, f"{name}ForCausalLM", **settings)


@each_table
@pytest.mark.parametrize("name", ["Gemma2", "Gemma3"])
def test_the_cap_of_a_models_settings(transformers, name, table):
    """It was refused by name."""
    model = gemma(transformers, name)
    with torch.no_grad():
        model.lm_head.weight.mul_(40)  # so that the cap does something
    TABLES[table](model)
    own = model(input_ids=IDS, labels=LABELS)
    assert 1 < float(own.logits.abs().max()) <= 1.5
    own.loss.backward()
    expected = gradients(model)
    loss = fused_loss_(model, softcap=1.5)  # which is the model's own
    check_loss(model, loss(model(input_ids=IDS), LABELS), own.loss, expected, close=1e-4)
    torch.testing.assert_close(model(input_ids=IDS, labels=LABELS).loss, own.loss)
    plain_(model)  # the settings still say it
    with pytest.raises(ConfigurationError, match="settings, 1.5; found 30"):
        fused_loss_(model, softcap=30.0)


@each_table
def test_a_cap_that_the_model_had_not(transformers, table):
    """It is a part of the model from then on, in training, evaluation and generation."""
    model = build(transformers)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
        logits = reference.softcapped(model(input_ids=IDS).logits, 1.5)
    TABLES[table](model)
    loss = fused_loss_(model, softcap=1.5)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS).logits, logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model.eval()(input_ids=IDS).logits, logits, rtol=1e-4, atol=1e-4)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten())
    model.train()
    torch.testing.assert_close(loss(model(input_ids=IDS), LABELS), expected, rtol=1e-4, atol=1e-4)
    copied = copy.deepcopy(model)
    torch.testing.assert_close(
        copied(input_ids=IDS, labels=LABELS).loss, expected, rtol=1e-4, atol=1e-4
    )
    fused_loss_(model, label_smoothing=0.1)  # another loss leaves it as it is
    assert float(model.eval()(input_ids=IDS).logits.abs().max()) <= 1.5
    with pytest.raises(UnsupportedError, match="cap 1.5"):
        plain_(model)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_z_loss_is_added_in_training(transformers, smoothing, softcap):
    model = build(transformers)
    plain = fused_loss_(model, softcap=softcap, label_smoothing=smoothing)
    loss = TokenLoss(model, z_loss=0.3, label_smoothing=smoothing)
    with torch.no_grad():
        logits = model(input_ids=IDS).logits[:, :-1].flatten(0, 1).double()
    targets = LABELS[:, 1:].flatten()
    count = targets.ne(-100).sum()
    squares = reference.z_losses(logits, targets, ignore_index=-100)[3] / count
    found = loss(model(input_ids=IDS), LABELS)
    expected = plain(model(input_ids=IDS), LABELS).double() + 0.3 * squares
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss.mean_square.double(), squares, rtol=1e-5, atol=1e-5)
    assert not loss.mean_square.requires_grad and plain.mean_square is None
    half = loss(model(input_ids=IDS), LABELS, num_items_in_batch=2 * count)
    torch.testing.assert_close(2 * half, found)
    found.backward()
    trained = gradients(model)
    logits = model(input_ids=IDS).logits  # hidden states, whose scores are made by hand
    scores = logits.features @ model.lm_head.weight.t()
    scores = scores[:, :-1].flatten(0, 1)
    by_hand = reference.z_losses(scores, targets, 0.3, softcap, 0.0, -100)[0] / count
    if not smoothing:
        by_hand.backward()
        same(trained, gradients(model), close=1e-4)
    model.eval()
    with torch.no_grad():  # in evaluation there is none
        outputs = model(input_ids=IDS)
        assert torch.equal(loss(outputs, LABELS), plain(outputs, LABELS))


def test_a_mixture_of_contexts_takes_both():
    for kind, options in (("mos", {"z_loss": 1e-4}), ("mos", {"softcap": 30.0})):
        with pytest.raises(UnsupportedError, match="one softmax.*MixtureOfSoftmaxes"):
            mixture_(Straight(), 3, kind=kind, shift=False, **options)
    torch.manual_seed(0)
    model = Straight()
    loss = mixture_(model, 3, kind="moc", shift=False, softcap=0.5, z_loss=0.3)
    found = loss(model(IDS), IDS)
    with torch.no_grad():
        model.eval()
        log_p = model(IDS)
    head = model.lm_head.mixture
    features = torch.tanh(model.embed(IDS))
    contexts = (head.log_prior(features).exp().unsqueeze(-1) * head.contexts(features)).sum(-2)
    scores = (contexts @ model.lm_head.weight.t()).flatten(0, 1)
    expected = reference.z_losses(scores, IDS.flatten(), 0.3, 0.5)
    torch.testing.assert_close(found, expected[0] / IDS.numel(), rtol=1e-5, atol=1e-5)
    capped = reference.softcapped(scores, 0.5).log_softmax(-1)
    torch.testing.assert_close(log_p.flatten(0, 1), capped, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigurationError, match="Pass it to mixture_"):
        fused_loss_(model, shift=False, softcap=2.0)


def test_the_normaliser_is_in_the_logs(transformers, trainer):
    from spectral_fairseq.training.callbacks import SpectralTrainerCallback

    model = build(transformers)
    fused_loss_(model, z_loss=1e-4)
    trained = trainer(model, max_steps=2)
    trained.add_callback(SpectralTrainerCallback(trained, measure_every=1))
    trained.train()
    found = [log["z_loss"] for log in trained.state.log_history if "z_loss" in log]
    assert len(found) == 2 and all(value > 1 for value in found)


def test_values_outside_the_range():
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ConfigurationError, match="`z_loss`"):
            fused_loss_(Straight(), shift=False, z_loss=wrong)
        with pytest.raises(ConfigurationError, match="`softcap`"):
            fused_loss_(Straight(), shift=False, softcap=wrong)


@each_table
@pytest.mark.parametrize("kind", ["mos", "moc"])
@pytest.mark.parametrize("layout", ["gpt2", "t5"])
def test_mixtures(transformers, layout, kind, table):
    model = build(transformers, layout)
    TABLES[table](model)
    loss = mixture_(model, 3, kind=kind)
    given = inputs(model, labels=LABELS)
    found = loss(model(**given), LABELS)
    found.backward()
    mixture = model.get_output_embeddings().mixture
    assert all(one.grad.any() for one in mixture.parameters())
    # By definition, from the hidden states that the layer hands on.
    features = model(**given).logits.features.detach().double()
    weight = model.get_output_embeddings().weight.detach().double()
    prior = (features @ mixture.prior.weight.detach().double().t()).softmax(-1)
    latent = features @ mixture.latent.weight.detach().double().t() + mixture.latent.bias.double()
    contexts = 4.0 * torch.tanh(latent).unflatten(-1, (3, DIM))
    if kind == "mos":
        p = ((contexts @ weight.t()).softmax(-1) * prior.unsqueeze(-1)).sum(-2)
    else:
        p = ((contexts * prior.unsqueeze(-1)).sum(-2) @ weight.t()).softmax(-1)
    targets = F.pad(LABELS, (0, 1), value=-100)[:, 1:] if loss.positions.shift else LABELS
    expected = F.nll_loss(p.log().flatten(0, 1), targets.flatten())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    model.eval()
    scores = model(**given).logits
    torch.testing.assert_close(scores.double(), p.log(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        loss(model(**given), LABELS).double(), expected, rtol=1e-5, atol=1e-5
    )


def test_a_mixture_refuses_what_would_change_its_probabilities(transformers):
    model = build(transformers, "marian")
    loss = mixture_(model, 2)
    given = inputs(model, labels=LABELS)
    with pytest.raises(UnsupportedError, match="mixture"):
        loss(model(**given), LABELS)
    model.final_logits_bias.zero_()
    assert loss(model(**given), LABELS) > 0
    with pytest.raises(UnsupportedError, match="without a mixture"):
        mixture_(model, 2)
    with pytest.raises(ConfigurationError, match="bias"):
        mixture_(build(transformers, "bert"), 2)
    with pytest.raises(ConfigurationError, match="kind"):
        mixture_(build(transformers), 2, kind="other")
