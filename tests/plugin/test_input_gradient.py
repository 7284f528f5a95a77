"""--input-gradient-scale: the two parts of a tied table's gradient."""

import copy

import pytest
import torch

from spectral_fairseq.embeddings import TABLES
from spectral_fairseq.errors import ConfigurationError
from tests.plugin.conftest import (
    build_criterion,
    build_host_model,
    build_model,
    make_sample,
    parameters_in_use,
)
from tests.plugin.stateful_models import segments

NOTHING = {"spectrum_weight": 0.0, "orthogonality_weights": "0,0,0,0"}
SHARING = (
    {"share_all_embeddings": True},
    {"share_all_embeddings": False, "share_decoder_input_output_embed": True},
)


def gradients(task, model, state, **options):
    model.load_state_dict(state)  # a spectral-norm table changes in every forward pass
    model.zero_grad()
    build_criterion(task, **NOTHING, **options)(model, make_sample(task))[0].backward()
    return {n: p.grad.clone() for n, p in parameters_in_use(model).items()}


def models(task):
    for sharing in SHARING:
        yield build_host_model(task, "transformer", **sharing)
        for kind in TABLES:
            yield build_model(task, embedding_type=kind.kind, **sharing)
    yield build_model(task, "transformer_mos", mixture_components=2)


@pytest.mark.slow
def test_a_scale_multiplies_the_look_ups_part_of_the_tables_gradient_alone(task):
    """The gradient is linear in the scale, so two scales tell what a third must give."""
    for model in models(task):
        model.double().train()
        state = copy.deepcopy(model.state_dict())
        one = gradients(task, model, state)
        same, three, five = (
            gradients(task, model, state, input_gradient_scale=scale) for scale in (1.0, 3.0, 5.0)
        )
        table = model.decoder.embed_tokens
        of_table = {id(parameter) for parameter in table.parameters()}
        assert of_table
        for name, parameter in parameters_in_use(model).items():
            assert torch.equal(same[name], one[name])
            part = (three[name] - one[name]) / 2  # what the look-ups contribute at a scale of 1
            torch.testing.assert_close(five[name], one[name] + 4 * part)
            assert bool(part.abs().max() > 1e-8) == (id(parameter) in of_table), name


@pytest.mark.parametrize("options", [{}, {"output_head": "mos"}, {"output_head": "moc"}])
@pytest.mark.parametrize("kind", [kind.kind for kind in TABLES])
def test_the_margin_of_the_adversarial_softmax_is_no_look_up(task, kind, options):
    model = build_model(task, embedding_type=kind, **options).train()
    look_ups = []
    model.decoder.embed_tokens.register_forward_hook(lambda *_: look_ups.append(True))
    for blockwise in (False, True):
        for epsilon in (0.0, 0.1):
            look_ups.clear()
            criterion = build_criterion(
                task, **NOTHING, adversarial_epsilon=epsilon, blockwise_loss=blockwise
            )
            criterion(model, make_sample(task))
            assert len(look_ups) == 2, (blockwise, epsilon)  # of the encoder and the decoder


@pytest.mark.parametrize("arch", ["awd_lstm_ptb", "transformer_xl_wt103_small"])
def test_language_models_that_carry_a_state(task, arch):
    model = build_model(task, arch, adaptive_softmax_cutoff="", share_all_embeddings=False)
    model.train()
    table = next(iter(model.decoder.network.embed_tokens.parameters()))
    found = []
    for scale in (1.0, 3.0, 5.0):
        model.zero_grad()
        torch.manual_seed(0)
        criterion = build_criterion(task, **NOTHING, input_gradient_scale=scale)
        criterion.check_model(model)
        criterion(model, segments(task))[0].backward()
        found.append(table.grad.clone())
    one, three, five = found
    assert not torch.equal(one, three)
    torch.testing.assert_close(five - one, 2 * (three - one), rtol=1e-4, atol=1e-5)


def test_separate_tables_are_refused(task):
    criterion = build_criterion(task, **NOTHING, input_gradient_scale=5.0)
    with pytest.raises(ConfigurationError, match="--input-gradient-scale.*separate tables"):
        criterion.check_model(build_model(task, share_all_embeddings=False))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_other_scales_are_refused(task, scale):
    with pytest.raises(ConfigurationError, match="--input-gradient-scale to be a finite number"):
        build_criterion(task, input_gradient_scale=scale)
