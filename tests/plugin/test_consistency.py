"""R-Drop as a criterion: the paper's objective, and what every likelihood keeps."""

import math

import pytest
import torch
from fairseq.logging import metrics

from spectral_fairseq.plugin.likelihood_consistency import twice
from tests.plugin.conftest import (
    LONGEST_FIRST,
    any_model,
    assert_close,
    build_criterion,
    build_model,
    gradients,
    make_sample,
    split,
)
from tests.reference import losses as reference

MODELS = ("plain", "svd", "weight-norm", "mos", "transformer separate", "lstm separate")
ALPHA = 5.0


def criterion_of(task, **options):
    return build_criterion(task, "regularized_cross_entropy", rdrop_weight=ALPHA, **options)


def naive(task, model, sample, smoothing):
    """(objective, NLL) from the log-probabilities of two passes with the same random numbers."""
    torch.manual_seed(7)
    pad = task.target_dictionary.pad()
    output = model(**twice(sample["net_input"]))
    log_p = torch.log_softmax(output[0], -1)  # of a mixture's log-probabilities: themselves
    first, second = (rows.flatten(0, 1) for rows in (log_p[::2], log_p[1::2]))
    return reference.r_drop(first, second, sample["target"].flatten(), ALPHA, smoothing, pad)


@pytest.mark.parametrize("report_accuracy", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_objective_is_that_of_the_paper(task, name, report_accuracy):
    model = any_model(task, name, dropout=0.2).double().train()
    sample = make_sample(task, sizes=LONGEST_FIRST)
    criterion = criterion_of(task, label_smoothing=0.1, report_accuracy=report_accuracy)
    criterion.check_model(model)
    expected, nll = naive(task, model, sample, 0.1)
    expected = expected / 2
    want = gradients(model, expected)
    torch.manual_seed(7)
    loss, size, log = criterion(model, sample)
    # fairseq's own log-softmax is in float32.
    tolerance = {"rtol": 1e-4, "atol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(loss, expected, **tolerance)
    torch.testing.assert_close(log["nll_loss"], nll.detach(), **tolerance)
    assert float(log["r_drop"]) > 0 and log["r_drop_size"] == size == sample["ntokens"]
    total = float(log["loss"]) + ALPHA / 2 * float(log["r_drop"])
    assert math.isclose(float(loss.detach()), total, rel_tol=1e-5)
    assert ("n_correct" in log) == report_accuracy
    assert_close(gradients(model, loss), want, **tolerance)


@pytest.mark.parametrize("report_accuracy", [False, True])
def test_a_prefix_that_is_ignored_counts_as_padding(task, report_accuracy):
    model, sample = build_model(task).double().train(), make_sample(task)
    options = {"report_accuracy": report_accuracy}
    target = sample["target"].clone()
    target[:, :2] = task.target_dictionary.pad()
    expected, _, log = criterion_of(task, **options)(model, {**sample, "target": target})
    found, _, own = criterion_of(task, ignore_prefix_size=2, **options)(model, sample)
    torch.testing.assert_close(found, expected)
    for name in ("r_drop", "nll_loss"):
        torch.testing.assert_close(own[name], log[name])


@pytest.mark.parametrize("parts", [[[0], [1, 2]], [[2], [1], [0]]])
def test_how_the_batch_is_split_and_padded_does_not_matter(task, parts):
    model, sample = build_model(task).double().train(), make_sample(task)
    criterion = criterion_of(task, cosreg_weight=0.1)
    whole, size, _ = criterion(model, sample)
    reference_gradients = gradients(model, whole / size)
    pieces = [criterion(model, padded(split(sample, rows))) for rows in parts]
    summed = gradients(model, sum(piece[0] for piece in pieces) / size)
    assert_close(summed, reference_gradients, rtol=1e-6, atol=1e-7)


def padded(sample):
    """The batch with two more columns of padding on the side where each has it."""
    pad = torch.ones(sample["target"].size(0), 2, dtype=torch.long)
    inputs = dict(sample["net_input"])
    inputs["src_tokens"] = torch.cat([pad, inputs["src_tokens"]], 1)
    inputs["prev_output_tokens"] = torch.cat([inputs["prev_output_tokens"], pad], 1)
    return {**sample, "net_input": inputs, "target": torch.cat([sample["target"], pad], 1)}


def test_validation_is_that_of_the_plain_criterion(task):
    model, sample = build_model(task, dropout=0.2).eval(), make_sample(task)
    plain = build_criterion(task, "label_smoothed_cross_entropy")
    loss, _, log = criterion_of(task)(model, sample)
    # By blocks, so up to rounding.
    assert torch.allclose(loss, plain(model, sample)[0], rtol=1e-6, atol=0.0)
    assert "r_drop" not in log


def test_the_divergence_is_shown_for_each_token(task):
    model, sample = build_model(task, dropout=0.2).train(), make_sample(task)
    criterion = criterion_of(task)
    log = criterion(model, sample)[2]
    with metrics.aggregate() as shown:
        criterion.reduce_metrics([log, log])
    assert math.isclose(
        shown.get_smoothed_values()["r_drop"],
        float(log["r_drop"]) / sample["ntokens"],
        abs_tol=1e-5,
    )
