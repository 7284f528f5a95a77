"""The penalties on the factors of an SVD table; test_penalties.py has what all penalties share."""

import math

import torch

from spectral_fairseq.embeddings.svd import SVDEmbedding
from spectral_fairseq.plugin.find import find_svd_tables
from spectral_fairseq.plugin.objective import interval_for
from spectral_fairseq.plugin.penalties import four_weights
from tests.capabilities import AUTOCAST_ATTENTION
from tests.plugin.conftest import (
    build_criterion,
    build_model,
    make_sample,
    off_constraint,
    split,
)
from tests.reference import spectra as reference

HEAVY = {"spectrum_weight": 0.3, "orthogonality_weights": "0.1,0.2,0.3,0.4"}


def test_loss_is_likelihood_plus_the_naive_penalties(task):
    model, sample = build_model(task), make_sample(task)
    table = off_constraint(model)
    model.train()
    loss, size, log = build_criterion(task, **HEAVY)(model, sample)
    u = reference.without_rows(table.U.detach() / table.scale, table.excluded_rows.tolist())
    v = table.V.detach() / table.v_scale
    expected_orthogonality = reference.orthogonality_penalty(u, v, (0.1, 0.2, 0.3, 0.4))
    expected_spectrum = reference.spectrum_penalty(
        (table.sigma * table.scale).tolist(), table.prior().tolist()
    )
    assert math.isclose(log["orthogonality"] / size, expected_orthogonality, rel_tol=1e-4)
    assert math.isclose(log["spectrum"] / size, expected_spectrum, rel_tol=1e-5)
    total = float(log["loss"]) + size * (0.3 * expected_spectrum + float(expected_orthogonality))
    assert math.isclose(float(loss), total, rel_tol=1e-5)


def test_more_padding_changes_nothing(task):
    model = build_model(task).train()
    off_constraint(model)
    criterion = build_criterion(task, **HEAVY)
    alone = criterion(model, make_sample(task, sizes=((3, 4),)))
    padded_sample = make_sample(task, sizes=((3, 4), (9, 11)))
    padded = criterion(model, split(padded_sample, [0]))
    torch.testing.assert_close(alone[0], padded[0], rtol=1e-5, atol=1e-4)


def test_filler_and_padding_rows_are_not_counted(task):
    model, sample = build_model(task), make_sample(task)
    criterion = build_criterion(task, **HEAVY)
    table = off_constraint(model)
    model.train()
    before = [value.clone() for _, _, value in criterion.objective_of(model).penalties(0)]
    symbols = task.target_dictionary.symbols
    fillers = [i for i, s in enumerate(symbols) if s.startswith("madeupword")]
    assert fillers, "the fixture must have made-up words for this test to mean anything"
    with torch.no_grad():
        table.U[fillers] += 3.0
    after = [value for _, _, value in criterion.objective_of(model).penalties(0)]
    torch.testing.assert_close(before, after, rtol=1e-3, atol=1e-4)
    loss, _, _ = criterion(model, sample)
    assert torch.isfinite(loss)


def test_a_shared_table_is_counted_once_and_separate_tables_each(task):
    shared = build_model(task)
    assert len(find_svd_tables(shared)) == 1
    separate = build_model(task, share_all_embeddings=False, embedding_tables="all")
    assert len(find_svd_tables(separate)) == 3
    one = dict(
        (n, v) for n, _, v in build_criterion(task, **HEAVY).objective_of(shared).penalties(0)
    )
    assert set(one) == {"spectrum", "orthogonality"}


@AUTOCAST_ATTENTION
def test_penalties_are_float32_under_autocast(task):
    model, sample = build_model(task).train(), make_sample(task)
    off_constraint(model)
    criterion = build_criterion(task, **HEAVY)
    exact = dict((n, v) for n, _, v in criterion.objective_of(model).penalties(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _, log = criterion(model, sample)
    for name, value in exact.items():
        assert log[name].dtype == torch.float32
        torch.testing.assert_close(log[name] / sample["ntokens"], value.detach())


def test_lazy_orthogonality_keeps_the_summed_gradient(task):
    """Every third update at three times the weight: the same sum while the table stands still."""
    model, sample = build_model(task).train(), make_sample(task)
    table = off_constraint(model)
    lazy = build_criterion(task, penalty_interval="3", **HEAVY)
    exact = build_criterion(task, penalty_interval="1", **HEAVY)
    sums = []
    for criterion in (lazy, exact):
        model.zero_grad()
        for update in range(6):
            criterion.num_updates = update
            criterion(model, sample)[0].backward()
        sums.append(table.U.grad.clone())
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-4, atol=1e-3)
    lazy.num_updates = 1
    log = lazy(model, sample)[2]
    assert log["orthogonality_size"] == 0 and log["spectrum_size"] == sample["ntokens"]


def test_the_automatic_interval_is_one_for_subword_vocabularies():
    assert [interval_for(n) for n in (10, 10_000, 40_000, 65_536, 267_735)] == [1, 1, 1, 4, 16]


def test_orthogonality_weights_parse():
    assert four_weights("1, 2,0,0.5") == (1.0, 2.0, 0.0, 0.5)


def test_tables_are_found_through_a_wrapper(task):
    wrapped = torch.nn.DataParallel(build_model(task))
    assert all(isinstance(t, SVDEmbedding) for t in find_svd_tables(wrapped))
