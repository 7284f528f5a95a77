"""R-Drop and SimCut as criterions: the papers' objective, and what every likelihood keeps."""

import math

import pytest
import torch
from fairseq.logging import metrics

from spectral_fairseq.plugin.likelihood_consistency import every_second_row_cut, twice
from tests.plugin.conftest import (
    LONGEST_FIRST,
    any_model,
    assert_close,
    build_criterion,
    build_model,
    gradients,
    make_sample,
    segments,
    split,
)
from tests.reference import losses as reference

MODELS = ("plain", "svd", "weight-norm", "mos", "transformer separate", "lstm separate")
METHODS = {"rdrop_weight": 5.0, "simcut_weight": 3.0}
ALL_CUT = 1 - 1e-9


def criterion_of(task, **options):
    return build_criterion(task, "regularized_cross_entropy", **options)


def naive(task, model, sample, flag, smoothing, cutoff):
    """(objective, NLL) from the log-probabilities of two passes with the same random numbers."""
    torch.manual_seed(7)
    pad = task.target_dictionary.pad()
    if flag == "simcut_weight":
        with every_second_row_cut(model, cutoff, pad):
            output = model(**twice(sample["net_input"]))
    else:
        output = model(**twice(sample["net_input"]))
    log_p = torch.log_softmax(output[0], -1)  # of a mixture's log-probabilities: themselves
    first, second = (rows.flatten(0, 1) for rows in (log_p[::2], log_p[1::2]))
    form = reference.r_drop if flag == "rdrop_weight" else reference.simcut
    return form(first, second, sample["target"].flatten(), METHODS[flag], smoothing, pad)


@pytest.mark.parametrize("report_accuracy", [False, True])
@pytest.mark.parametrize("flag", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_the_objective_is_that_of_the_paper(task, name, flag, report_accuracy):
    model = any_model(task, name, dropout=0.2).double().train()
    sample = make_sample(task, sizes=LONGEST_FIRST)
    criterion = criterion_of(
        task,
        label_smoothing=0.1,
        simcut_cutoff=0.5,
        report_accuracy=report_accuracy,
        **{flag: METHODS[flag]},
    )
    criterion.check_model(model)
    expected, nll = naive(task, model, sample, flag, 0.1, 0.5)
    expected = expected / 2 if flag == "rdrop_weight" else expected
    want = gradients(model, expected)
    torch.manual_seed(7)
    loss, size, log = criterion(model, sample)
    # fairseq's own log-softmax is in float32.
    tolerance = {"rtol": 1e-4, "atol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(loss, expected, **tolerance)
    torch.testing.assert_close(log["nll_loss"], nll.detach(), **tolerance)
    key, weight = ("r_drop", 2.5) if flag == "rdrop_weight" else ("simcut", 3.0)
    assert float(log[key]) > 0 and log[f"{key}_size"] == size == sample["ntokens"]
    total = float(log["loss"]) + weight * float(log[key])
    assert math.isclose(float(loss.detach()), total, rel_tol=1e-5)
    assert ("n_correct" in log) == report_accuracy
    assert_close(gradients(model, loss), want, **tolerance)


@pytest.mark.parametrize("report_accuracy", [False, True])
@pytest.mark.parametrize("flag", METHODS)
def test_a_prefix_that_is_ignored_counts_as_padding(task, flag, report_accuracy):
    model, sample = build_model(task).double().train(), make_sample(task)
    options = {flag: METHODS[flag], "simcut_cutoff": ALL_CUT, "report_accuracy": report_accuracy}
    target = sample["target"].clone()
    target[:, :2] = task.target_dictionary.pad()
    expected, _, log = criterion_of(task, **options)(model, {**sample, "target": target})
    found, _, own = criterion_of(task, ignore_prefix_size=2, **options)(model, sample)
    torch.testing.assert_close(found, expected)
    for name in ("r_drop" if flag == "rdrop_weight" else "simcut", "nll_loss"):
        torch.testing.assert_close(own[name], log[name])


@pytest.mark.parametrize("flag", METHODS)
@pytest.mark.parametrize("parts", [[[0], [1, 2]], [[2], [1], [0]]])
def test_how_the_batch_is_cut_and_padded_does_not_matter(task, flag, parts):
    model, sample = build_model(task).double().train(), make_sample(task)
    options = {"simcut_cutoff": ALL_CUT, flag: METHODS[flag]}
    criterion = build_criterion(task, "mle_cosreg", cosreg_weight=0.1, **options)
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


@pytest.mark.parametrize("embedding_type", ["plain", "svd", "weight-norm"])
def test_what_is_cut(task, embedding_type):
    """All but the last source word and the first target word, in every second row."""
    model, sample = build_model(task, embedding_type=embedding_type), make_sample(task)
    seen = []
    inputs, pad = twice(sample["net_input"]), task.target_dictionary.pad()
    with every_second_row_cut(model, ALL_CUT, pad):
        hook = model.encoder.embed_tokens.register_forward_hook(
            lambda _, tokens, vectors: seen.append((tokens[0], vectors))
        )
        model(**inputs)
    hook.remove()
    assert torch.equal(seen[0][0], inputs["src_tokens"])
    assert torch.equal(seen[1][0], inputs["prev_output_tokens"])
    for (tokens, vectors), kept in zip(seen, (-1, 0)):
        whole = model.encoder.embed_tokens(tokens)
        assert torch.equal(vectors[::2], whole[::2])
        expected = torch.zeros_like(whole[1::2])
        expected[:, kept] = whole[1::2, kept]
        assert torch.equal(vectors[1::2], expected)
    assert torch.equal(model.encoder.embed_tokens(tokens), whole)  # the hooks are gone


def test_the_share_that_is_cut(task):
    table = torch.nn.Embedding(50, 3)
    model = torch.nn.Module()
    model.embed_tokens = table
    torch.manual_seed(3)
    tokens = torch.randint(4, 50, (40, 500))
    with every_second_row_cut(model, 0.05, 1):
        vectors = table(tokens)
    share = vectors[1::2, :-1].eq(0).all(-1).double().mean()
    assert abs(float(share) - 0.05) < 0.008  # 10,000 positions: 3.6 standard deviations


def test_a_language_model_is_cut_at_its_input(task):
    model = build_model(task, "transformer_lm_sc", share_decoder_input_output_embed=True).train()
    sample = segments(task, pad=2)
    loss, _, log = criterion_of(task, simcut_weight=3.0, simcut_cutoff=0.5)(model, sample)
    assert float(log["simcut"]) > 0 and torch.isfinite(loss)


def test_validation_is_that_of_the_plain_criterion(task):
    model, sample = build_model(task, dropout=0.2).eval(), make_sample(task)
    plain = build_criterion(task, "label_smoothed_cross_entropy")
    for flag, value in METHODS.items():
        loss, _, log = criterion_of(task, **{flag: value})(model, sample)
        # By blocks, so up to rounding.
        assert torch.allclose(loss, plain(model, sample)[0], rtol=1e-6, atol=0.0)
        assert "r_drop" not in log


def test_the_divergence_is_shown_for_each_token(task):
    model, sample = build_model(task, dropout=0.2).train(), make_sample(task)
    criterion = criterion_of(task, rdrop_weight=5.0)
    log = criterion(model, sample)[2]
    with metrics.aggregate() as shown:
        criterion.reduce_metrics([log, log])
    assert math.isclose(
        shown.get_smoothed_values()["r_drop"],
        float(log["r_drop"]) / sample["ntokens"],
        abs_tol=1e-5,
    )
