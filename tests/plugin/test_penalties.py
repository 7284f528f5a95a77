"""The criterion quartet of each penalty, on this package's tables and on fairseq's models."""

import math
from types import SimpleNamespace

import pytest
import torch
from fairseq.logging import metrics

from spectral_fairseq.errors import ConfigurationError, DataError
from spectral_fairseq.functional.cosines import mean_cosine
from spectral_fairseq.methods.penalties import PENALTIES, WEIGHT_NORM, required_svd_tables
from spectral_fairseq.plugin.find import output_matrix
from spectral_fairseq.plugin.objective import PENALTY_FLAGS, Words, interval_for
from spectral_fairseq.plugin.presets import PRESETS
from spectral_fairseq.plugin.table_and_head import uncounted_rows
from tests.capabilities import HALF_ON_CPU
from tests.plugin.conftest import (
    FAIRSEQ_MODELS,
    KINDS,
    LONGEST_FIRST,
    any_model,
    assert_close,
    build_criterion,
    build_host_model,
    build_model,
    gradients,
    make_sample,
    off_constraint,
    parameters_in_use,
    split,
    words,
)
from tests.reference.penalties import PENALTIES as NAIVE_FORMS

NAMES = [penalty.name for penalty in PENALTIES]
NOTHING = {penalty.weight.name: penalty.weight.default for penalty in PENALTIES}

SETTINGS = {"spectrum_c1": "2.0", "spectrum_c2": 0.1}
# flag -> (key in the logs, its naive form on the counted rows W of the table, float64)
NAIVE = {
    penalty.weight.name: (penalty.name, NAIVE_FORMS[penalty.name])
    for penalty in PENALTIES
    if penalty.needs is not required_svd_tables
}


ALL = {
    **{name: 0.1 if off == 0.0 else "0.1,0.2,0.3,0.4" for name, off in NOTHING.items()},
    "label_smoothing": 0.1,
}


def counted(task, weight):
    excluded = set(uncounted_rows(task.target_dictionary))
    keep = [i for i in range(weight.size(0)) if i not in excluded]
    return weight.detach().double()[keep]


@pytest.mark.parametrize(
    "name", [*KINDS, *(name for name in FAIRSEQ_MODELS if name != "adaptive softmax")]
)
@pytest.mark.parametrize("flag", NAIVE)
def test_value(task, name, flag):
    """On fairseq's models, and on every kind of table."""
    if name == "svd" and flag == "spectrum_weight":
        pytest.skip("an SVD table has a prior of its own")
    model = any_model(task, name).train()
    sample = make_sample(task, sizes=LONGEST_FIRST)
    key, naive = NAIVE[flag]
    criterion = build_criterion(task, "mle_cosreg", **{**NOTHING, **SETTINGS, flag: 0.7})
    loss, size, log = criterion(model, sample)
    table = output_matrix(model, len(task.target_dictionary))
    expected = float(naive(counted(task, table)))
    assert math.isclose(float(log[key]) / size, expected, rel_tol=2e-4, abs_tol=1e-6)
    total = float(log["loss"]) + 0.7 * size * expected
    assert math.isclose(float(loss.detach()), total, rel_tol=1e-4)
    found = gradients(model, loss)
    assert found.keys() >= set(dict(parameters_in_use(model)))
    assert all(torch.isfinite(one).all() for one in found.values())


@pytest.mark.parametrize("sentence_avg", [False, True])
def test_the_scale_is_that_of_the_sample(task, sentence_avg):
    """With --sentence-avg fairseq divides by sentences, so penalties count them too."""
    model, sample = build_model(task).train(), make_sample(task)
    options = {**NOTHING, "cosreg_weight": 50.0, "sentence_avg": sentence_avg}
    loss, size, log = build_criterion(task, "mle_cosreg", **options)(model, sample)
    assert size == log["sample_size"] == sample["nsentences" if sentence_avg else "ntokens"]
    table = counted(task, output_matrix(model, len(task.target_dictionary)))
    added = 50.0 * size * float(NAIVE["cosreg_weight"][1](table))
    assert math.isclose(float(loss.detach() - log["loss"]), added, rel_tol=1e-3)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name, model", [
    *((preset, "transformer shared") for preset in PRESETS), ("spectrum_control", "svd"),
])  # fmt: skip
def test_zero_weight_equals_the_plain_criterion_bit_for_bit(task, name, model, label_smoothing):
    model, sample = any_model(task, model).train(), make_sample(task)
    options = {"label_smoothing": label_smoothing}
    ours = build_criterion(task, name, loss_form="dense", **options, **NOTHING)
    plain = build_criterion(task, "label_smoothed_cross_entropy", **options)
    results = [criterion(model, sample) for criterion in (ours, plain)]
    assert torch.equal(results[0][0], results[1][0]) and results[0][1:] == results[1][1:]
    assert_close(*(gradients(model, one[0]) for one in results), rtol=0, atol=0)


@pytest.mark.parametrize("epsilon", [0.0, 0.05])
@pytest.mark.parametrize("parts", [[[0, 1, 2]], [[0], [1, 2]], [[2], [1], [0]]])
def test_every_penalty_at_once_does_not_depend_on_how_the_batch_is_cut(task, parts, epsilon):
    """What --update-freq and several workers do: sum the gradients, divide by all tokens."""
    model, sample = build_model(task).double().train(), make_sample(task)
    off_constraint(model)
    criterion = build_criterion(task, "weight_norm", **ALL, adversarial_epsilon=epsilon)
    whole, size, log = criterion(model, sample)
    assert {f"{n}_size" for n in NAMES} <= set(log)
    reference = gradients(model, whole / size)
    pieces = [criterion(model, split(sample, rows)) for rows in parts]
    assert sum(piece[1] for piece in pieces) == size
    summed = gradients(model, sum(piece[0] for piece in pieces) / size)
    assert_close(summed, reference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("epsilon, form, rtol", [(0.0, "dense", 0.0), (0.05, "auto", 1e-6)])
def test_logs_and_validation_are_pure_and_dummy_batches_are_finite(task, epsilon, form, rtol):
    """fairseq trains idle workers on a dummy batch whose loss it multiplies by zero."""
    model, sample = build_model(task), make_sample(task)
    off_constraint(model)
    options = {**ALL, "adversarial_epsilon": epsilon, "loss_form": form}
    criterion = build_criterion(task, "weight_norm", **options)
    plain = build_criterion(task, "label_smoothed_cross_entropy", label_smoothing=0.1)
    model.eval()
    loss, _, log = criterion(model, sample)
    assert torch.allclose(loss, plain(model, sample)[0], rtol=rtol, atol=0.0)
    assert not set(NAMES) & set(log)
    model.train()
    loss, _, log = criterion(model, sample)
    if not epsilon:
        assert torch.equal(log["loss"], plain(model, sample)[2]["loss"])
    for gradient in gradients(model, loss * 0).values():
        assert torch.isfinite(gradient).all()


def test_targets_by_count_differ_between_words(task):
    flags = SimpleNamespace(weight_norm_target=2.0, weight_norm_target_by_count=True)
    options = WEIGHT_NORM.for_words(flags, Words(task.target_dictionary, task))
    target = options.weight_norm_target.on(torch.device("cpu"))
    excluded = set(uncounted_rows(task.target_dictionary))
    kept = [i for i in range(len(target)) if i not in excluded]
    assert math.isclose(float(target[kept].mean()), 2.0, rel_tol=1e-5)
    frequent, rare = (task.target_dictionary.index(w) for w in ("w0", "w44"))
    assert target[frequent] > target[rare]


@pytest.mark.parametrize("flag", [*NAIVE, "weight_norm_target_by_count"])
def test_words_are_those_of_the_decoder(task, flag):
    """A multilingual task has a dictionary for each language and shows the first alone."""
    other = SimpleNamespace(source_dictionary=words(30), target_dictionary=words(30))
    options = {**NOTHING, flag: 0.7}
    if flag == "weight_norm_target_by_count":
        options = {**NOTHING, "weight_norm_weight": 0.7, flag: True}
    model = build_host_model(other, "transformer", share_all_embeddings=True).train()
    shown, own = (
        build_criterion(t, "mle_cosreg", **options).objective_of(model).penalties
        for t in (task, other)
    )
    ((_, _, found),) = shown(0)
    ((_, _, expected),) = own(0)
    assert float(found.detach()) == float(expected.detach())


def test_evaluation_needs_no_counts():
    """fairseq-validate may have a split alone, with a dictionary of sentencepiece."""
    uncounted = words()
    uncounted.count = [100] * len(uncounted)
    task = SimpleNamespace(source_dictionary=uncounted, target_dictionary=uncounted)
    model, sample = build_model(task, embedding_type="plain").eval(), make_sample(task)
    criterion = build_criterion(task, "weight_norm", weight_norm_target_by_count=True)
    assert torch.isfinite(criterion(model, sample)[0])
    with pytest.raises(DataError, match="all with the count 100"):  # before training
        criterion.check_model(model)


def test_between_updates_lazy_penalties_are_shown_but_not_averaged(task):
    model, sample = build_model(task, embedding_type="plain").train(), make_sample(task)
    criterion = build_criterion(task, "mle_cosreg", penalty_interval="3")

    def shown():
        with metrics.aggregate() as inner:
            criterion.reduce_metrics([criterion(model, sample)[2]])
        return inner["cosine"].avg

    values = []
    with metrics.aggregate() as epoch:
        for update in range(1, 5):  # as after training was resumed at an update without penalty
            criterion.num_updates = update
            values.append(float(shown()))
            assert ("cosine" in epoch) and bool(epoch["cosine"].count) == (update >= 3)
            with torch.no_grad():
                model.decoder.embed_tokens.weight.add_(0.1)
    assert values[0] == values[1] != values[2] == values[3]
    assert float(epoch["cosine"].avg) == values[2]


@HALF_ON_CPU
def test_half_precision_parameters_give_float32_penalties(task):
    model = build_model(task).half().train()
    criterion = build_criterion(task, "weight_norm", **ALL)
    for penalty in criterion.objective_of(model).penalties(0):
        assert penalty.value.dtype == torch.float32 and torch.isfinite(penalty.value)


@pytest.mark.parametrize("flag", [
    *(flag.name for flag in PENALTY_FLAGS if flag.at_least == 0),
    "adversarial_epsilon",
    "label_smoothing",
])  # fmt: skip
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_bad_values_are_refused(task, flag, value):
    with pytest.raises(ConfigurationError, match="--" + flag.replace("_", "-")):
        build_criterion(task, "mle_cosreg", **{flag: value})


def test_the_scores_that_an_accuracy_needs_are_warned_of(task, caplog):
    for accuracy in (False, True):
        criterion = build_criterion(task, loss_form="blockwise", report_accuracy=accuracy)
        criterion.check_model(build_model(task))
        assert ("--report-accuracy" in caplog.text) is accuracy
    caplog.clear()
    for form in ("dense", "auto"):
        criterion = build_criterion(task, loss_form=form, report_accuracy=True)
        criterion.check_model(build_model(task, output_head="mos"))
        assert ("--report-accuracy" in caplog.text) is (form == "auto")


def test_the_spectrum_of_a_narrow_cone_is_logged_exactly(task):
    """In float32 all but the largest value were zero, and the effective rank was 1."""
    model = build_host_model(task, "transformer").eval()
    weight = output_matrix(model, len(task.target_dictionary))
    with torch.no_grad():
        weight.copy_(1 + 1e-5 * torch.randn(weight.shape))
    log = build_criterion(task, "mle_cosreg", log_spectrum_interval=1)(model, make_sample(task))[2]
    exact = torch.linalg.svdvals(counted(task, weight).double())
    assert math.isclose(log["table_sigma_min"], float(exact[-1]), rel_tol=1e-2)


def test_a_table_that_has_diverged_ends_no_training_by_its_log(task, caplog):
    model, sample = build_host_model(task, "transformer").eval(), make_sample(task)
    criterion = build_criterion(task, "regularized_cross_entropy", log_spectrum_interval=1)
    with torch.no_grad():
        output_matrix(model, len(task.target_dictionary))[5] = math.nan
    for update in range(2):
        criterion.num_updates = update
        log = criterion(model, sample)[2]
        assert math.isnan(log["table_sigma_max"]) and log["tables_measured"] == 1
    assert sum("output table of" in one.getMessage() for one in caplog.records) == 1


def test_each_of_several_models_has_its_spectrum_logged(task):
    criterion = build_criterion(task, "mle_cosreg", log_spectrum_interval=10)
    for model in (build_model(task).eval(), build_model(task).eval()):
        assert "table_sigma_max" in criterion(model, make_sample(task))[2]


def test_spectrum_is_measured_once_in_a_validation(task):
    model, sample = build_model(task), make_sample(task)
    criterion = build_criterion(task, "mle_cosreg", log_spectrum_interval=10)
    model.train()
    assert "table_sigma_max" not in criterion(model, sample)[2]
    model.eval()
    logs = [criterion(model, sample)[2] for _ in range(2)]
    assert logs[1] == logs[0]  # of another batch, or of another --valid-subset
    table = counted(task, output_matrix(model, len(task.target_dictionary)))
    assert math.isclose(
        logs[0]["table_sigma_max"], float(torch.linalg.svdvals(table)[0]), rel_tol=1e-4
    )
    # As the report defines it, by N (N - 1) pairs; the penalty of the same rows divides by N^2.
    assert math.isclose(logs[0]["table_mean_cosine"], mean_cosine(table), rel_tol=1e-4)
    criterion.num_updates = 9
    assert "table_sigma_max" not in criterion(model, sample)[2]
    criterion.num_updates = 10
    assert "table_sigma_max" in criterion(model, sample)[2]
    with metrics.aggregate() as aggregated:
        criterion.reduce_metrics([logs[0], logs[0], logs[1]])  # of workers or of batches
    values = aggregated.get_smoothed_values()
    assert math.isclose(values["table_sigma_max"], logs[0]["table_sigma_max"], abs_tol=1e-5)
    assert "ppl" in values and "tables_measured" not in values


def test_the_automatic_interval_is_one_for_subword_vocabularies():
    assert [interval_for(n) for n in (10, 10_000, 40_000, 65_536, 267_735)] == [1, 1, 1, 4, 16]
