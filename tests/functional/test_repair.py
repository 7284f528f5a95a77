"""Which rows are repaired, and what they get."""

import pytest
import torch
from torch import nn

from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.functional.rows import new_rows, rows_to_repair
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
