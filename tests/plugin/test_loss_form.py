"""``--loss-form``: which form a model gets, that the forms agree, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from fairseq.models.transformer import TransformerDecoder

from spectral_fairseq.errors import UnsupportedError
from spectral_fairseq.plugin.likelihood import SMALL_IN_HALF, Blockwise
from tests.plugin.conftest import (
    LONGEST_FIRST,
    build_criterion,
    build_model,
    host_model,
    make_sample,
)

OFF = {"name": "mle_cosreg", "cosreg_weight": 0.0}


@pytest.fixture
def scores_are_not_made(monkeypatch):
    """The dense likelihood fails."""
    monkeypatch.setattr(
        "spectral_fairseq.plugin.criterion.PenalisedCrossEntropy.compute_loss",
        lambda *_, **__: pytest.fail("the scores of all words were made"),
    )


def models(task):
    return [
        build_model(task),
        build_model(task, "transformer_mos", mixture_components=3),
        *(host_model(task, f"transformer {one}") for one in ("shared", "separate")),
        host_model(task, "lstm separate"),
    ]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("training", [True, False])
def test_auto_gives_the_dense_loss(task, smoothing, training):
    options = {**OFF, "label_smoothing": smoothing, "ignore_prefix_size": 1}
    for model in models(task):
        model.train(training)
        for module in model.modules():
            module.dropout = 0.0 if isinstance(getattr(module, "dropout", None), float) else None
        sample = make_sample(task, sizes=LONGEST_FIRST)
        results = [
            build_criterion(task, loss_form=form, **options)(model, sample)
            for form in ("auto", "dense")
        ]
        torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-6, atol=0)
        for key, value in results[1][2].items():
            assert float(results[0][2][key]) == pytest.approx(float(value), rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_auto_takes_blocks_on_a_cpu(task, training, scores_are_not_made):
    for model in models(task):
        criterion = build_criterion(task, **OFF)
        assert criterion.objective_of(model).form.blockwise
        criterion(model.train(training), make_sample(task, sizes=LONGEST_FIRST))
        with pytest.raises(pytest.fail.Exception):
            build_criterion(task, loss_form="dense", **OFF)(
                model, make_sample(task, sizes=LONGEST_FIRST)
            )


class Scaled(TransformerDecoder):
    def output_layer(self, features):
        return 2 * super().output_layer(features)


class Tempered(TransformerDecoder):
    def get_normalized_probs(self, net_output, log_probs, sample=None):
        return super().get_normalized_probs((net_output[0] / 2, None), log_probs, sample)


class Layer(torch.nn.Linear):
    def forward(self, features):
        return 2 * super().forward(features)


def obscured(task, change):
    model = host_model(task, "transformer shared")
    change(model.decoder)
    return model


def weight_normed(decoder):
    with torch.no_grad():
        decoder.output_projection.weight[1] = 1.0  # of padding, which has no direction
    torch.nn.utils.weight_norm(decoder.output_projection)


@pytest.mark.parametrize("change, why", [
    (lambda decoder: setattr(decoder, "__class__", Scaled), "output_layer of its own"),
    (lambda decoder: setattr(decoder, "__class__", Tempered), "probabilities in its own way"),
    (lambda decoder: setattr(decoder.output_projection, "__class__", Layer), "no plain one"),
    (weight_normed, "no plain one"),
])  # fmt: skip
def test_what_might_be_another_loss_stays_dense(task, change, why):
    model, sample = obscured(task, change).eval(), make_sample(task)
    criterion = build_criterion(task, **OFF)
    assert why in str(criterion.objective_of(model).form)
    expected = build_criterion(task, "label_smoothed_cross_entropy")(model, sample)[0]
    assert torch.equal(criterion(model, sample)[0], expected)


@pytest.mark.parametrize("name, options, why", [
    ("transformer separate", {"report_accuracy": True}, "--report-accuracy"),
    ("transformer separate", {"gradient_gating": 0.03}, "--gradient-gating"),
    ("fconv", {}, "calls no output_layer"),
])  # fmt: skip
def test_what_needs_the_scores_stays_dense(task, name, options, why):
    model = host_model(task, name)
    form = build_criterion(task, **OFF, **options).objective_of(model).form
    assert not form.blockwise and why in str(form)


def test_blocks_are_refused_where_a_model_is_bound_even_if_it_is_only_evaluated(task):
    model = host_model(task, "fconv").eval()
    with pytest.raises(UnsupportedError, match="FConvDecoder"):
        build_criterion(task, **OFF, loss_form="blockwise").objective_of(model)


def test_small_batches_of_half_precision_stay_dense_on_a_cpu(task):
    for dtype, small in ((torch.float32, 0), (torch.bfloat16, SMALL_IN_HALF)):
        form = build_criterion(task, **OFF).objective_of(build_model(task).to(dtype)).form
        assert form.blockwise and form.dense_up_to == small


def test_on_a_gpu_only_scores_that_do_not_fit_are_cut(task, monkeypatch):
    model, sample = build_model(task).eval(), make_sample(task)
    weight = SimpleNamespace(device=torch.device("cuda", 0))
    with monkeypatch.context() as patch:
        patch.setattr(model, "parameters", lambda: iter([weight]))
        patch.setattr("torch.cuda.mem_get_info", lambda _: (1e9, 72e9))
        form = build_criterion(task, **OFF).objective_of(model).form
    # A third of 72 GB are 24e9 bytes: 12 for each of N words and a token.
    assert form.dense_up_to == 2e9 // len(task.target_dictionary)
    made = []
    criterion = build_criterion(task, **OFF)
    dense = criterion.compute_loss
    monkeypatch.setattr(criterion, "compute_loss", lambda *a, **k: made.append(1) or dense(*a, **k))
    tokens = sample["target"].numel()
    for limit in (tokens, tokens - 1):
        Blockwise(criterion, criterion.objective_of(model).parts, limit)(model, sample, True)
    assert len(made) == 1


def test_the_dense_form_of_a_mixture(task):
    model = build_model(task, "transformer_mos", mixture_components=3).train()
    dense = build_criterion(task, **OFF, loss_form="dense")
    dense.check_model(model)
    plain = build_criterion(task, "label_smoothed_cross_entropy")
    sample = make_sample(task)
    assert torch.equal(dense(model, sample)[0], plain(model, sample)[0])
    lowered = build_criterion(task, **OFF, loss_form="dense", adversarial_epsilon=0.1)
    with pytest.raises(UnsupportedError, match="found --loss-form dense"):
        lowered.check_model(model)


def test_r_drop_takes_the_form_that_is_asked_for(task, scores_are_not_made, monkeypatch):
    model, sample = build_model(task).train(), make_sample(task)
    forms = {
        form: build_criterion(task, **OFF, rdrop_weight=1.0, loss_form=form)
        for form in ("auto", "dense")
    }
    first = forms["auto"](model, sample)[0]
    seen = []
    scores = type(forms["dense"]).get_lprobs_and_target
    monkeypatch.setattr(
        type(forms["dense"]),
        "get_lprobs_and_target",
        lambda *given: seen.append(1) or scores(*given),
    )
    second = forms["dense"](model, sample)[0]
    torch.testing.assert_close(first, second, rtol=1e-6, atol=0)
    assert seen
