"""Which rows are repaired, and what they get."""

import pytest
import torch
from torch import nn

from spectral_fairseq.errors import ConfigurationError, DataError, UnsupportedError
from spectral_fairseq.functional.looks_trained import looks_trained
from spectral_fairseq.functional.row_norms import row_lengths
from spectral_fairseq.functional.row_repair import new_rows, rows_to_repair
from spectral_fairseq.training import plain_, repair_, weight_norm_

LONG, SHORT, ZERO, SAME = 3, 5, 7, 11


def table(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(500, 32, generator=generator) + 0.5
    weight[LONG] *= 50
    weight[SHORT] *= 0.01
    weight[ZERO] = 0
    weight[SAME] = weight[SAME + 1]
    weight[20:24] = torch.randn(4, 32, generator=generator) * 0.02 / 32**0.5
    return weight.to(dtype)


@pytest.mark.parametrize(
    "choices, expected",
    [
        (["untrained"], [SHORT, ZERO, SAME, SAME + 1, 20, 21, 22, 23]),
        (["zero"], [ZERO]),
        (["long"], [LONG]),
        (["initial"], [20, 21, 22, 23]),
        (["zero", "long"], [LONG, ZERO]),
    ],
)
def test_rows_are_found_by_name(choices, expected):
    found = rows_to_repair(table(), choices, initial_length=0.02)
    assert found.tolist() == expected
    left_out = torch.tensor(expected[:1])
    assert rows_to_repair(table(), choices, left_out, 0.02).tolist() == expected[1:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_new_rows_are_the_mean_of_the_others_with_a_small_noise(dtype):
    weight, rows = table(dtype), torch.tensor([LONG, ZERO])
    others = torch.ones(500, dtype=torch.bool)
    others[rows] = False
    wide = torch.promote_types(dtype, torch.float32)
    mean, spread = weight[others].to(wide).mean(0), weight[others].to(wide).std(0)
    torch.testing.assert_close(new_rows(weight, rows, noise=0.0), mean.expand(2, -1))
    found = new_rows(weight, rows)
    assert found.dtype == wide and not torch.equal(found[0], found[1])
    assert 0.003 < ((found - mean) / spread).std() < 0.02
    assert torch.equal(found, new_rows(weight, rows)) and not torch.equal(
        found, new_rows(weight, rows, seed=2)
    )
    assert 0.6 < ((new_rows(weight, rows, "normal") - mean) / spread).std() < 1.5
    assert not new_rows(weight, rows, "zero").any()


def test_what_cannot_be_repaired_is_refused():
    with pytest.raises(ConfigurationError, match="`rows`"):
        rows_to_repair(table(), ["outliers"])
    with pytest.raises(ConfigurationError, match="`initial_length`"):
        rows_to_repair(table(), ["initial"])
    with pytest.raises(ConfigurationError, match="`fill`"):
        new_rows(table(), torch.tensor([1]), "median")
    with pytest.raises(ConfigurationError, match="two trained rows"):
        new_rows(table(), torch.arange(499))


class Model(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed = nn.Embedding(500, 32, padding_idx=0)
        self.lm_head = nn.Linear(32, 500, bias=False)
        self.lm_head.weight.data.copy_(table())
        if tied:
            self.embed.weight = self.lm_head.weight
        self.get_input_embeddings = lambda: self.embed


@pytest.mark.parametrize("tied", [True, False])
def test_the_tables_of_a_model_are_repaired_in_place(tied):
    model = Model(tied)
    weight = model.lm_head.weight
    model.embed.weight.data[0] = 0
    found = repair_(model, fill="normal")
    assert model.lm_head.weight is weight and weight.requires_grad
    assert len(found) == (1 if tied else 2)
    rows = next(rows for rows in found.values() if rows)
    assert rows == [SHORT, ZERO, SAME, SAME + 1, 20, 21, 22, 23]
    assert not model.embed.weight[0].any()
    others = [row for row in range(1, 500) if row not in rows]
    assert torch.equal(weight[others], table()[others])
    assert not any(repair_(model).values())
    weight_norm_(model)
    with pytest.raises((ConfigurationError, UnsupportedError), match="plain_"):
        repair_(model)
    plain_(model)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_table_that_is_not_finite_is_not_repaired(number):
    """NaN went into the rows that were filled, and hid those that are zero or short."""
    rows = table()
    rows[7, 2] = number
    message = "infinity or NaN in 1 of"
    with pytest.raises(DataError, match=message):
        rows_to_repair(rows)
    with pytest.raises(DataError, match=message):
        new_rows(rows, torch.tensor([0]))
    layer = torch.nn.Linear(rows.size(1), len(rows), bias=False)
    layer.weight.data.copy_(rows)
    with pytest.raises(DataError, match=message):
        repair_(layer)


def test_an_outlier_is_no_part_of_the_mean():
    """One row 1,000 times too long gave the others five times the usual length."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 16, generator=generator) + 1.0
    rows[5] *= 1_000
    rows[[20, 21]] = 0
    for fill in ("mean", "normal"):
        made = new_rows(rows, torch.tensor([20, 21]), fill)
        others = rows[torch.arange(200) > 21]
        expected = new_rows(
            torch.cat([rows[[20, 21]], rows[:5], rows[6:20], others]), torch.tensor([0, 1]), fill
        )
        torch.testing.assert_close(made, expected)
    layer = torch.nn.Linear(16, 200, bias=False)
    layer.weight.data.copy_(rows)
    assert repair_(layer) == {"weight": [20, 21]}
    assert rows_to_repair(layer.weight.detach(), ["long", "untrained"]).tolist() == [5]


STARTS = {
    "normal": lambda rows: torch.nn.init.normal_(rows, 0, 0.02),
    "uniform": lambda rows: torch.nn.init.uniform_(rows, -0.1, 0.1),
    "xavier": torch.nn.init.xavier_uniform_,
    "orthogonal": torch.nn.init.orthogonal_,
    "truncated": lambda rows: torch.nn.init.trunc_normal_(rows, 0, 0.02, -0.04, 0.04),
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("size", [(30, 4), (60, 16), (2_000, 64)])
def test_no_usual_start_looks_trained(start, size):
    torch.manual_seed(0)
    for _ in range(5):
        rows = STARTS[start](torch.empty(size))
        rows[3] = 0
        assert not looks_trained(rows)
    if size[1] < 16:
        return  # too few numbers to tell by
    longer = rows * torch.linspace(0.2, 5, len(rows)).unsqueeze(1)
    assert looks_trained(longer) and looks_trained(rows + 0.5 * rows.std())
    assert not looks_trained(longer, torch.arange(2, len(rows)))


@pytest.mark.parametrize("tied", [True, False])
def test_rows_that_a_user_names(tied):
    """As after a vocabulary has grown, by the mean or by the subwords of the old tokenizer."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(40, 8), "lm_head": nn.Linear(8, 40, bias=False)})
    if tied:
        model["lm_head"].weight = model["embed"].weight
    model.get_input_embeddings = lambda: model["embed"]
    model.lm_head = model["lm_head"]
    with torch.no_grad():
        model["embed"].weight[7] *= 1_000
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    found = repair_(model, rows=[38, 39], noise=0.0)
    assert set(map(tuple, found.values())) == {(38, 39)} and len(found) == 2 - tied
    for name, weight in model.named_parameters():
        trained = before[name][:38]
        usual = trained[row_lengths(trained) < 100]
        torch.testing.assert_close(weight[38:], usual.mean(0).expand(2, -1))
        assert torch.equal(weight[:38], trained)
    repair_(model, rows={38: [1, 2, 3], 39: [7]}, noise=0.0)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight[38], before[name][1:4].mean(0))
        assert torch.equal(weight[39], before[name][7]) and torch.equal(
            weight[:38], before[name][:38]
        )
    table = model["embed"].weight.detach()
    with pytest.raises(ConfigurationError, match="lists of subwords, one for each row"):
        new_rows(table, torch.tensor([38, 39]), "mean", 0.0, None, 1, [[1, 2]])
    for wrong in ([40], [], {38: []}, {38: [39], 39: [1]}, {38: [50]}):
        with pytest.raises(ConfigurationError):
            repair_(model, rows=wrong)
