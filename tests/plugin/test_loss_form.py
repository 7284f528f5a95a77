"""``--loss-form``: which form a model gets, that the forms agree, and what is refused."""

from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from fairseq.models.transformer import TransformerDecoder, TransformerModel
from fairseq.tasks import FairseqTask

from spectral_fairseq.errors import UnsupportedError
from spectral_fairseq.plugin.likelihood import Blockwise
from tests.plugin.conftest import (
    KINDS,
    LONGEST_FIRST,
    OFF,
    any_model,
    assert_close,
    build_criterion,
    build_model,
    gradients,
    make_sample,
)


@pytest.fixture
def scores_are_not_made(monkeypatch):
    """The dense likelihood fails."""
    monkeypatch.setattr(
        "spectral_fairseq.plugin.criterion.PenalisedCrossEntropy.compute_loss",
        lambda *_, **__: pytest.fail("the scores of all words were made"),
    )


MODELS = ("svd", "mos", "transformer shared", "transformer separate", "lstm separate")


@pytest.mark.parametrize("smoothing", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
@pytest.mark.parametrize("name, options", [
    *((name, {"embedding_type": kind}) for name in ("plain", "capped", "mos", "moc")
      for kind in KINDS),
    ("moc", {"logit_softcap": 1.5}),
    *((name, {}) for name in ("transformer shared", "transformer separate", "lstm separate")),
])  # fmt: skip
def test_every_form_gives_the_loss_of_fairseqs_criterion(task, name, options, smoothing):
    model = any_model(task, name, **options).double()
    sample = make_sample(task, sizes=LONGEST_FIRST)
    flags = {"label_smoothing": smoothing, "ignore_prefix_size": 1}
    plain = build_criterion(task, "label_smoothed_cross_entropy", **flags)
    for training in (True, False):
        expected, _, log = plain(model.train(training), sample)
        wanted = gradients(model, expected)
        for form in ("dense", "auto", "blockwise"):
            loss, _, other = build_criterion(task, loss_form=form, **OFF, **flags)(model, sample)
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6, check_dtype=False)
            for key, value in log.items():
                assert float(other[key]) == pytest.approx(float(value), rel=1e-6)
            assert_close(gradients(model, loss), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["plain", "mos", "transformer shared", "lstm separate"])
@pytest.mark.parametrize("options", [
    *({"loss_form": form} for form in ("dense", "auto")),
    *({"loss_form": form, "rdrop_weight": 1.0} for form in ("dense", "auto")),
    *({"adversarial_epsilon": 0.1}, {"z_loss": 0.1}, {"cosreg_weight": 1.0}),
])  # fmt: skip
def test_a_worker_without_a_batch_takes_part_with_zeros(task, name, options):
    """fairseq multiplies its loss by zero in place."""
    if name == "mos" and "z_loss" in options:
        pytest.skip("a mixture has no single normaliser")
    model, sample = any_model(task, name).train(), make_sample(task, LONGEST_FIRST)
    criterion = build_criterion(task, **{**OFF, **options})
    optimizer = SimpleNamespace(backward=lambda loss: loss.backward())
    FairseqTask.train_step(task, sample, model, criterion, optimizer, 0, ignore_grad=True)
    found = [each.grad for each in model.parameters() if each.grad is not None]
    assert found and not any(each.any() for each in found)


@pytest.mark.parametrize("training", [True, False])
def test_auto_takes_blocks_on_a_cpu(task, training, scores_are_not_made):
    sample = make_sample(task, sizes=LONGEST_FIRST)
    for name in MODELS:
        model, criterion = any_model(task, name).train(training), build_criterion(task, **OFF)
        assert criterion.objective_of(model).form.blockwise
        criterion(model, sample)
        with pytest.raises(pytest.fail.Exception):
            build_criterion(task, loss_form="dense", **OFF)(model, sample)


class Scaled(TransformerDecoder):
    def output_layer(self, features):
        return 2 * super().output_layer(features)


class Tempered(TransformerDecoder):
    def get_normalized_probs(self, net_output, log_probs, sample=None):
        return super().get_normalized_probs((net_output[0] / 2, None), log_probs, sample)


class Sharpened(TransformerDecoder):
    def forward(self, *args, **kwargs):
        scores, extra = super().forward(*args, **kwargs)
        return 2 * scores, extra


class SharpenedModel(TransformerModel):
    def forward(self, *args, **kwargs):
        scores, extra = super().forward(*args, **kwargs)
        return 2 * scores, extra


class Layer(torch.nn.Linear):
    def forward(self, features):
        return 2 * super().forward(features)


def obscured(task, change):
    model = any_model(task, "transformer shared")
    change(model)
    return model


def weight_normed(model):
    decoder = model.decoder
    with torch.no_grad():
        decoder.output_projection.weight[1] = 1.0  # of padding, which has no direction
    torch.nn.utils.weight_norm(decoder.output_projection)


@pytest.mark.parametrize("change, why", [
    (lambda model: setattr(model.decoder, "__class__", Scaled), "output_layer of its own"),
    (lambda model: setattr(model.decoder, "__class__", Tempered), "probabilities in its own way"),
    (lambda model: setattr(model.decoder, "__class__", Sharpened), "forward pass of its own"),
    (lambda model: setattr(model, "__class__", SharpenedModel), "forward pass of its own"),
    (lambda model: setattr(model.decoder.output_projection, "__class__", Layer), "no plain one"),
    (weight_normed, "no plain one"),
])  # fmt: skip
def test_what_might_be_another_loss_stays_dense(task, change, why):
    model, sample = obscured(task, change).eval(), make_sample(task)
    criterion = build_criterion(task, **OFF)
    assert why in str(criterion.objective_of(model).form)
    expected = build_criterion(task, "label_smoothed_cross_entropy")(model, sample)[0]
    assert torch.equal(criterion(model, sample)[0], expected)
    # Without dropout both passes of R-Drop agree, and their mean is the likelihood.
    both = build_criterion(task, **OFF, rdrop_weight=1.0)(model.train(), sample)[0]
    torch.testing.assert_close(both, expected)


@pytest.mark.parametrize("name, options, why", [
    ("transformer separate", {"report_accuracy": True}, "--report-accuracy"),
    ("fconv", {}, "calls no output_layer"),
])  # fmt: skip
def test_what_needs_the_scores_stays_dense(task, name, options, why):
    model = any_model(task, name)
    form = build_criterion(task, **OFF, **options).objective_of(model).form
    assert not form.blockwise and why in str(form)


def test_blocks_are_refused_where_a_model_is_bound_even_if_it_is_only_evaluated(task):
    model = any_model(task, "fconv").eval()
    with pytest.raises(UnsupportedError, match="FConvDecoder"):
        build_criterion(task, **OFF, loss_form="blockwise").objective_of(model)


def test_small_batches_of_half_precision_stay_dense_on_a_cpu(task):
    model = build_model(task)
    for dtype, small in ((torch.float32, 0), (torch.bfloat16, 15)):  # d = 16
        form = build_criterion(task, **OFF).objective_of(model.to(dtype)).form
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


@pytest.mark.parametrize("name, options, form", [
    ("plain", {"adversarial_epsilon": 0.1}, "blockwise: --adversarial-epsilon"),
    ("plain", {"rdrop_weight": 1.0}, "blockwise: --rdrop-weight cuts every batch"),
    ("mos", {"rdrop_weight": 1.0}, "dense: --rdrop-weight needs the probabilities"),
    ("plain", {"loss_form": "blockwise", "report_accuracy": True}, "dense: --report-accuracy"),
    ("mos", {"report_accuracy": True}, "dense: --report-accuracy"),
])  # fmt: skip
def test_the_form_that_is_logged_is_that_of_the_training(task, name, options, form, monkeypatch):
    model, sample = any_model(task, name).to(torch.bfloat16).train(), make_sample(task)
    criterion = build_criterion(task, **OFF, **options)
    made = []
    compute = type(criterion).get_lprobs_and_target
    counted = lambda *given: made.append(1) or compute(*given)  # noqa: E731
    monkeypatch.setattr(type(criterion), "get_lprobs_and_target", counted)
    criterion(model, sample)
    assert str(criterion.objective_of(model).form).startswith(form)
    assert bool(made) == form.startswith("dense")


def test_another_thread_translates_while_a_loss_is_computed(task):
    model, sample = any_model(task, "transformer shared").train(), make_sample(task)
    criterion = build_criterion(task, **OFF)
    expected = model(**sample["net_input"])[0]
    term = criterion.objective_of(model).likelihood
    found = []
    with term.output_layer_replaced(lambda features: features.sum()):
        other = Thread(target=lambda: found.append(model(**sample["net_input"])[0]))
        other.start()
        other.join()
        assert model(**sample["net_input"])[0].dim() == 0
    torch.testing.assert_close(found[0], expected)
    assert "output_layer" not in vars(model.decoder)
