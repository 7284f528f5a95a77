"""Known answers on hand-made tables, invariances, and agreement with numpy and naive forms."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from spectral_fairseq.analysis import table_facts
from spectral_fairseq.analysis.catalogue import ALL
from spectral_fairseq.analysis.measures import measure_table
from spectral_fairseq.analysis.options import SHARES, Options, StepCallback
from spectral_fairseq.analysis.table_facts import TableFacts
from spectral_fairseq.checkpoints.dictionary import read_dictionary
from spectral_fairseq.errors import ConfigurationError, DataError
from spectral_fairseq.formats.table import StoredTable
from spectral_fairseq.functional.row_blocks import sample_rows
from spectral_fairseq.functional.spectrum_penalty import Prior
from tests.checkpoints.made import cone, entries, extracted, save_dictionary, with_padding
from tests.reference import measures as naive


def table_of(rows):
    """A table without padding, in the rows' own precision."""
    return StoredTable("t", "plain", rows, torch.arange(len(rows)), str(rows.dtype))


def measured(rows, **options):
    return measure_table(table_of(rows), Options(**options))


def stored(weight, kind="plain", **options):
    """The table of a checkpoint whose matrix is ``weight``."""
    return extracted(entries(weight, kind), **options)


@pytest.fixture
def words(tmp_path):
    """The dictionary of 61 rows, of which the second is padding."""
    return read_dictionary(save_dictionary(tmp_path / "dict.txt", 57))


def test_signed_identity_blocks_are_isotropic():
    eye = torch.eye(5, dtype=torch.float64)
    found = measured(torch.cat([2 * eye, -2 * eye])).measures
    assert found["i1"] == pytest.approx(1) and found["i2"] == pytest.approx(0, abs=1e-9)
    assert found["i1_centred"] == pytest.approx(1)
    assert found["mean_cosine"] == pytest.approx(-1 / 9)
    assert found["mean_share"] == pytest.approx(0)
    assert found["isoscore"] == pytest.approx(1)
    assert (found["effective_rank"], found["stable_rank_centred"]) == pytest.approx((5, 5))
    assert (found["sigma_max"], found["sigma_min"]) == pytest.approx((8**0.5, 8**0.5))


def test_vectors_too_long_to_be_measured():
    rows = cone()
    rows[7, 1] = 1e30
    with pytest.raises(DataError, match=r"1 of 60 that are too long, with entries up to 1e\+30"):
        measured(rows)
    assert measured(rows.double()).measures["sigma_max"] == pytest.approx(1e30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [-40, -63, -75, -125])
def test_measures_of_short_vectors(dtype, exponent):
    rows = cone().to(dtype)
    rows[7] = 0
    scale = 2.0**exponent
    expected, found = measured(rows).measures, measured(rows * scale).measures
    on_scale = {"i1", "i2", "sigma_max", "sigma_min", "norm_mean"}  # which depend on it
    for key, value in expected.items():
        if key not in on_scale and value is not None:
            assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-9), key
    assert found["sigma_max"] == pytest.approx(scale * expected["sigma_max"], rel=1e-5)


def test_vectors_too_short_to_be_measured():
    with pytest.raises(DataError, match="of a length of at least 1e-70; found .*e-9.* longest"):
        measured(cone().double() * 1e-90)


def test_naive_forms_and_numpy():
    rows = cone(37, 5).double()
    result = measured(rows)
    found = result.measures
    z = naive.partitions_both_signs(rows)
    assert (found["i1"], found["i2"]) == pytest.approx((naive.i1(z), naive.i2(z)))
    moved = rows - rows.mean(0)
    z = naive.partitions_both_signs(moved / moved.square().sum(1).mean().sqrt())
    assert (found["i1_centred"], found["i2_centred"]) == pytest.approx((naive.i1(z), naive.i2(z)))
    assert found["isoscore"] == pytest.approx(naive.isoscore(rows))
    assert found["mean_cosine"] == pytest.approx(naive.mean_cosine(rows))
    mean = rows.mean(0).norm() / rows.square().sum(1).mean().sqrt()
    assert found["mean_share"] == pytest.approx(float(mean))
    np.testing.assert_allclose(
        result.details["singular_values"], np.linalg.svd(rows.numpy(), compute_uv=False), rtol=1e-9
    )


def test_every_measure_is_in_the_documents():
    page = Path(__file__).parents[2] / "docs" / "measures.md"
    if not page.exists():
        pytest.skip("the documents are not beside these tests")
    text = page.read_text("utf-8")
    assert len(ALL) <= 40
    assert [m.key for m in ALL if f"`{m.key}`" not in text and not m.key.startswith("bleu")] == []


def test_every_measure_is_in_the_catalogue(words):
    table = stored(with_padding(cone(60)), "svd")
    found = measure_table(table, Options(), words, Prior(c2=0.1)).measures
    elsewhere = {m.key for m in ALL if m.compute is None}
    assert set(found) == {m.key for m in ALL} - elsewhere
    assert {"bleu_4_recall", "log_probability_rank"} < elsewhere and len(elsewhere) < 20
    assert len({m.key for m in ALL}) == len(ALL)
    assert found["stored_sigma_error"] < 1e-4 and found["prior_error"] > 0.01


@pytest.mark.parametrize("options", [{}, {"isotropy_words": 50, "isotropy_runs": 1}])
def test_centred_measures_are_those_of_the_centred_table(options):
    rows = cone(80, 6).double()
    found = measured(rows, **options).measures
    sample = rows[sample_rows(80, 50, 1)] if options else rows
    centred = measured(rows - rows.mean(0)).measures
    moved = sample - sample.mean(0)
    isotropy = measured(moved / moved.square().sum(1).mean().sqrt()).measures
    for key in ("mean_cosine", "effective_rank"):
        assert found[f"{key}_centred"] == pytest.approx(centred[key], rel=1e-6, abs=1e-9), key
    for key in ("i1", "i2"):
        assert found[f"{key}_centred"] == pytest.approx(isotropy[key], rel=1e-6)
    assert found["mean_share"] > 0.5 and centred["mean_share"] == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_a_random_table_measures_what_is_expected_of_one(tmp_path):
    torch.manual_seed(0)
    n, d = 2996, 32
    words = read_dictionary(save_dictionary(tmp_path / "dict.txt", n - 3))
    found = measure_table(stored(with_padding(3 * torch.randn(n, d))), Options(), words)
    random = found.details["random"]
    slack = {"effective_rank": 0.01, "positive_cosines": 0.01, "isoscore": 0.02}
    for key, expected in random.items():
        if key in found.measures:
            rel = slack.get(key.replace("_centred", ""), 0.1)
            assert found.measures[key] == pytest.approx(expected, rel=rel, abs=0.03), key
    assert len(random) > 15


def test_frequency_groups(words):
    table = stored(with_padding(cone(60)))
    result = measure_table(table, Options(), words)
    order = sorted(range(60), key=lambda at: (-words.counts[int(table.rows[at])], at))
    rows = table.weight.double()
    for at, group in enumerate(("frequent", "medium", "rare")):
        part = rows[order[20 * at : 20 * at + 20]]
        expected = pytest.approx(naive.mean_cosine(part), rel=1e-5)
        assert result.measures[f"mean_cosine_{group}"] == expected
    counts = result.details["counts"]
    assert counts["count"] == sorted(counts["count"], reverse=True) and counts["rank"][-1] == 60
    assert measured(cone(60)).measures["mean_cosine_rare"] is None


def test_rows_that_are_all_equal():
    found = measured(torch.ones(9, 3).double() / 3).measures
    assert found["mean_cosine"] == pytest.approx(1) and found["mean_share"] == pytest.approx(1)
    assert found["effective_rank_centred"] == 0
    assert found["i1_centred"] is None and found["untrained_rows"] == 9


def test_untrained_rows_are_named(words):
    weight = with_padding(cone())
    weight[[9, 30]] = 0
    found = measure_table(stored(weight), Options(), words)
    assert found.measures["untrained_rows"] == 2
    assert found.details["untrained"] == [{"row": 9, "word": "w5"}, {"row": 30, "word": "w26"}]


def test_a_narrow_table_is_measured_without_a_wide_copy():
    rows = cone(300, 8).bfloat16()
    narrow, wide = measured(rows).measures, measured(rows.float()).measures
    for key, value in wide.items():
        assert narrow[key] == (None if value is None else pytest.approx(value, rel=1e-3)), key


def test_a_table_that_is_too_wide_to_be_read_whole_is_sampled(monkeypatch):
    rows = cone(3000, 6)
    exact = measured(rows)
    monkeypatch.setattr(table_facts, "SAMPLED_WORDS", 2000)
    assert measured(rows).measures == exact.measures  # few products
    monkeypatch.setattr(table_facts, "MOST_PRODUCTS", 3000 * 6**2 - 1)
    found = measured(rows)
    assert found.details["isotropy_runs"]["words"] == 2000
    for key, value in exact.measures.items():
        if key[:2] in ("i1", "i2"):
            assert found.measures[key] != value, key
            assert found.measures[key] == pytest.approx(value, rel=0.05), key
        else:
            assert found.measures[key] == value, key


def test_samples_average_seeded_runs():
    rows = cone(500, 4).double()
    result = measured(rows, isotropy_words=100, isotropy_runs=3, seed=7)
    runs = result.details["isotropy_runs"]
    assert runs["words"] == 100 and len(set(runs["values"]["i1"])) == 3
    for run, value in enumerate(runs["values"]["i2"]):
        sample = measured(rows[sample_rows(500, 100, 7 + run)]).measures
        assert value == pytest.approx(sample["i2"])
    assert result.measures["i1"] == pytest.approx(sum(runs["values"]["i1"]) / 3)
    again = measured(rows, isotropy_words=100, isotropy_runs=3, seed=7)
    assert again.measures == result.measures
    assert measured(rows, isotropy_words=100, seed=8).measures["i1"] != result.measures["i1"]
    whole = measured(rows, isotropy_words=500)
    assert whole.details["isotropy_runs"] is None
    assert whole.measures["i1"] == measured(rows).measures["i1"]


def test_sample_rows_are_distinct_and_uniform():
    hits = torch.zeros(10)
    for seed in range(400):
        rows = sample_rows(10, 3, seed)
        assert len(set(rows.tolist())) == 3
        hits[rows] += 1
    assert (hits / 400 - 0.3).abs().max() < 0.1


def test_norms_follow_frequency(words):
    counts = torch.tensor(words.counts).clamp(min=1).double()
    directions = torch.nn.functional.normalize(cone(61).double())
    weight = directions * counts.log1p().unsqueeze(1) * 0.5
    table = stored(weight)
    found = measure_table(table, Options(), words)
    assert found.measures["norm_count_pearson"] == pytest.approx(1)
    assert found.measures["norm_count_slope"] == pytest.approx(0.5)
    assert found.details["frequency_order"] == "counts"
    order = TableFacts(table, Options(), words).frequency_order
    assert table.rows[order[0]] == 4 and len(order.unique()) == 60
    # A dictionary without counts says nothing.
    words.counts = [1] * 61
    assert measure_table(table, Options(), words).measures["norm_count_pearson"] is None


def test_neighbours(words):
    weight = with_padding(cone())
    weight[10] = weight[20] * 3
    table = stored(weight, excluded=words.uncounted_rows())
    found = measure_table(table, Options(words=("w6", "w16"), neighbours=2), words)
    near = found.details["neighbours"]
    assert near["w6"][0] == {"word": "w16", "cosine": pytest.approx(1)}
    assert near["w16"][0]["word"] == "w6" and len(near["w6"]) == 2
    with pytest.raises(DataError, match="'w'.*w0"):
        measure_table(table, Options(words=("w",)), words)
    with pytest.raises(DataError, match="<pad>"):
        measure_table(table, Options(words=("<pad>",)), words)
    with pytest.raises(DataError, match="'x' in the dictionary"):
        measure_table(table, Options(words=("x",)), dataclasses.replace(words, path=None))
    with pytest.raises(ConfigurationError, match="`dictionary`"):
        measure_table(table, Options(words=("w6",)))


def test_projection_keeps_the_first_two_coordinates():
    rows = torch.diag(torch.tensor([1.0, 5.0, 3.0])).repeat(4, 1).double()
    rows[0:3] *= -0.5
    found = measured(rows, projection="svd")
    norms = found.projection.norm(dim=0)
    expected = torch.tensor(found.details["singular_values"][:2], dtype=torch.float64)
    torch.testing.assert_close(norms, expected)
    assert found.projection_rank.tolist() == list(range(1, 13))
    for turned in (rows + 1, -rows - 1):  # an eigenvector's sign is arbitrary, a picture's is not
        assert (measured(turned).projection.mean(0) > 0).all()
    centred = measured(rows + 9, projection="pca").projection
    torch.testing.assert_close(
        centred.mean(0), torch.zeros(2, dtype=torch.float64), atol=1e-9, rtol=0
    )
    for seed in (1, 8):
        found = measured(rows, projection_words=5, seed=seed)
        assert found.projection.shape == (5, 2)
        assert found.projection_rank.tolist() == (sample_rows(12, 5, seed) + 1).tolist()


class Recorded(StepCallback):
    def __init__(self):
        self.units, self.done = {}, {}

    def begin(self, step, units=1):
        self.step = step
        self.units[step], self.done[step] = units, 0

    def advance(self, units):
        self.done[self.step] += units


@pytest.mark.parametrize("sampled", [{}, {"isotropy_words": 20, "isotropy_runs": 3}])
def test_progress_goes_by_rows(sampled):
    heard = Recorded()
    measure_table(table_of(cone()), Options(**sampled), progress=heard)
    assert list(heard.units) == list(SHARES)[2:6]
    for step in ("singular values", "partition function"):
        assert heard.done[step] == heard.units[step] > 1


def test_a_sample_in_float32_is_as_good():
    """Note [Z in float32]; the rows of float64 are measured in float64."""
    torch.manual_seed(3)
    rows = cone(900, 24) + torch.randn(900, 24) * torch.linspace(2, 0.1, 24)
    options = {"isotropy_words": 500, "isotropy_runs": 2}
    # The longer ones have exponents that float32 cannot hold.
    for table, bound in ((rows, 1e-5), (100 * rows, 1e-9)):
        narrow, wide = (measured(one, **options).measures for one in (table, table.double()))
        for key in (key for key in wide if key.startswith(("i1", "i2"))):
            assert narrow[key] == pytest.approx(wide[key], rel=bound), key


def test_impossible_input():
    with pytest.raises(DataError, match="zeros only"):
        measured(torch.zeros(9, 3))
    for name in ("isotropy_words", "isotropy_runs", "cosine_words", "neighbours", "seed"):
        with pytest.raises(ConfigurationError, match=f"`{name}` to be"):
            dataclasses.replace(Options(), **{name: -1})


def test_one_dimension():
    found = measured(torch.tensor([[1.0], [2.0], [-1.0]])).measures
    assert found["isoscore"] is None and found["effective_rank"] == pytest.approx(1)
