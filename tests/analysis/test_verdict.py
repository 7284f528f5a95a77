"""The sentences with which a report opens."""

import re
from pathlib import Path

import pytest
import torch

from spectral_fairseq.analysis import analyze
from spectral_fairseq.analysis.catalogue import shown
from spectral_fairseq.analysis.wording import ADVICE, OF_LANGUAGE_MODELS, verdict, warnings
from studies.quickstart import what_next


def checkpoint(
    share=0.1,
    cosine=0.01,
    rank=90.0,
    label="a",
    remark=None,
    output=True,
    origin="fairseq",
    language_model=False,
    trained_with=(),
):
    return {
        "origin": origin,
        "language_model": language_model,
        "trained_with": list(trained_with),
        "label": label,
        "measures": {
            "mean_share": share,
            "mean_cosine": cosine,
            "mean_cosine_centred": -0.001,
            "effective_rank_centred": rank,
            "sigma_over_edge_centred": 1.05,
            "stable_rank_centred": 50.0,
            "untrained_rows": 0.0,
        },
        "random": {
            "mean_share": 0.01,
            "effective_rank_centred": 99.0,
            "stable_rank_centred": 80.0,
        },
        "table": {"name": "decoder.x", "dimensions": 100, "words": 10000, "is_output": output},
        "dictionary": {"path": None if remark else "dict.txt", "remark": remark or "given"},
        "untrained": [],
        "dominant_row": None,
    }


# The edge: (1 + sqrt(100 / 10000))^2 / 100 = 0.0121 = 0.11^2.
@pytest.mark.parametrize(
    "one, meaning, spread, advice",
    [
        (checkpoint(0.109), "are spread evenly", "many directions", "nothing to repair"),
        (checkpoint(0.111), "share a direction", "many directions", "--criterion spectrum_control"),
        (checkpoint(0.8, 0.6), "narrow cone", "many directions", "changes no probability"),
        (checkpoint(0.8, output=False), "narrow cone", "many directions", "acts like a bias"),
        (checkpoint(0.1, rank=49.4), "use few directions", "few directions", "transformer_sc"),
        (checkpoint(0.8, rank=20.0), "narrow cone", "few directions", "transformer_sc"),
    ],
)
def test_the_sentences_follow_the_figures(one, meaning, spread, advice):
    first, normal, last = verdict(one)
    assert meaning in first and spread in first and "of 100 (random 99)" in first
    assert f"{100 * one['measures']['mean_share'] ** 2:.2g} %" in first and "0.01 %)" in first
    assert f"{one['measures']['mean_cosine']} (random vectors 0), and of -0.001 with" in normal
    assert advice in last and meaning in first.split(". ")[0]
    assert (ADVICE in last) == ("nothing to repair" not in last)


@pytest.mark.parametrize("rank, arch", [(90.0, "--criterion"), (20.0, "transformer_lm_sc ")])
def test_a_language_model_has_advice_of_its_own(rank, arch):
    """In language models no method of this package has certainly gained."""
    for origin in ("fairseq", "model"):
        last = verdict(checkpoint(0.8, rank=rank, origin=origin, language_model=True))[-1]
        assert OF_LANGUAGE_MODELS in last and ADVICE not in last and "weight_norm_" not in last
        assert (arch in last) == (origin == "fairseq")


@pytest.mark.parametrize("rank", (90.0, 20.0))
def test_what_a_table_was_trained_with_is_not_advised(rank):
    last = verdict(checkpoint(0.8, rank=rank, trained_with=["spectrum control"]))[-1]
    assert "trained with spectrum control" in last and "--criterion spectrum_control" not in last
    last = verdict(checkpoint(0.8, rank=rank, trained_with=["weight norm"]))[-1]
    assert "Tune the weight decay." in last and "transformer_wn" not in last
    assert "--criterion spectrum_control" in last


@pytest.mark.parametrize("dimensions", (1, 2))
def test_a_narrow_cone_of_few_dimensions_is_not_called_harmless(dimensions):
    """The third sentence contradicted the first."""
    one = checkpoint(0.8, rank=90.0)
    one["table"]["dimensions"] = dimensions
    first, _, last = verdict(one)
    assert "narrow cone" in first and "nothing to repair" not in last


@pytest.mark.parametrize("output", (False, True))
@pytest.mark.parametrize("share, rank", [(0.05, 90.0), (0.8, 90.0), (0.8, 20.0), (0.05, 20.0)])
@pytest.mark.parametrize("origin", ("model", "vectors"))
def test_other_frameworks_are_not_told_of_flags(origin, share, rank, output):
    text = " ".join(verdict(checkpoint(share, rank=rank, output=output, origin=origin)))
    assert "--" not in text
    assert ("docs/library.md" in text) == (share > 0.11 or rank < 49.5)
    assert ("Biś et al." in text) == (origin == "model")


def test_no_figure_is_minus_zero():
    one = checkpoint()
    one["measures"]["mean_cosine_centred"] = -1e-6
    assert "-0" not in " ".join(verdict(one))
    assert shown(-0.0) == shown(0.0) == "0"


def test_the_same_advice_is_given_everywhere():
    """By README and by the end of the quickstart in the same words."""
    assert ADVICE in " ".join(what_next(Path("quickstart")).split())
    readme = Path("README.md").read_text("utf-8")
    assert ADVICE in " ".join(readme.split())


def test_functions_that_the_verdict_names_are_in_the_library_guide():
    guide = Path("docs/library.md").read_text("utf-8")
    told = {
        w
        for one in (0.8, 0.1)
        for rank in (20.0, 90.0)
        for w in re.findall(
            r"\w+_\w+", " ".join(verdict(checkpoint(one, rank=rank, origin="model")))
        )
    }
    assert {"weight_norm_", "spectral_fairseq"} <= told
    assert all(name in guide for name in told)


def test_a_missing_dictionary_is_told_once_for_all_that_miss_it():
    found = warnings(
        [
            checkpoint(label="a", remark="none given"),
            checkpoint(label="b"),
            checkpoint(label="c", remark="none given"),
            checkpoint(label="d", remark="of 9 words"),
        ]
    )
    assert len(found) == 2 and "for a, c: none given" in found[0] and "for d:" in found[1]


def test_untrained_rows_are_told():
    one = checkpoint(label="x")
    one["untrained"] = [{"row": 4, "word": "w0"}, {"row": 9, "word": None}]
    one["measures"]["untrained_rows"] = 1200.0
    (found,) = warnings([one])
    assert "1,200 rows look never trained in x" in found and "w0, row 9." in found
    assert "repair_(model.decoder.x)" in found
    one["origin"] = "model"
    assert "repair_(model)" in warnings([one])[0]
    one["origin"] = "vectors"
    assert "repair_" not in warnings([one])[0]


def test_rows_that_were_never_trained_are_not_called_sound():
    rows = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0))
    rows[1000:] = 0
    text = " ".join(str(analyze({"lm_head.weight": rows})).split())
    assert "1,000 rows look never trained" in text and "repair_(model)" in text
    assert "nothing to repair" not in text and "Apart from the rows" in text


@pytest.mark.parametrize("shape", [(200, 1), (2, 1), (2, 2)])
def test_a_table_of_one_dimension_or_two_words_has_one_line(shape):
    rows = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    (one,) = analyze(rows).to_dict()["checkpoints"]
    assert "all of them lie on one line" in verdict(one)[0]
    assert "many directions" not in verdict(one)[0]


def no_row_dwarfs():
    """(name, table): rows as long as others, whatever their mean or their directions."""
    generator = torch.Generator().manual_seed(5)
    mean, direction = torch.randn(2, 64, generator=generator)
    mean, direction = mean / mean.norm(), direction / direction.norm()
    along = 0.5 * torch.randn(300, 1, generator=generator) * direction
    yield "cone", torch.randn(300, 64, generator=generator) / 8 + 12 * mean + along
    random = torch.randn(2000, 64, generator=generator)
    axes = torch.linalg.qr(torch.randn(64, 10, generator=generator))[0].t()
    for several in (2, 10):
        table = random.clone()
        table[:several] = 600 * axes[:several]
        yield f"{several} rows", table
    zipf = torch.arange(1, 2001)[:, None] ** -0.5
    yield "lengths of Zipf", torch.nn.functional.normalize(random) * zipf


@pytest.mark.parametrize("name, table", [pytest.param(*one, id=one[0]) for one in no_row_dwarfs()])
def test_a_row_like_others_is_not_called_dominant(name, table):
    (one,) = analyze(table).to_dict()["checkpoints"]
    assert one["dominant_row"] is None
    assert "alone holds" not in verdict(one)[0] and "Look at" not in verdict(one)[-1]


def family():
    """(name, table): each strays from a random one in a way of its own, more and more."""
    words, dim = 2000, 48
    generator = torch.Generator().manual_seed(6)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    direction = torch.nn.functional.normalize(random(dim), dim=0)
    for size in (0.0, 0.5, 1.0, 2.0, 5.0, 20.0, 300.0):
        yield f"direction {size}", random(words, dim) + size * random(words, 1) * direction
        yield f"clusters {size}", random(words, dim) + size * random(words, 1).sign() * direction
        yield f"cone {size}", random(words, dim) + size * direction
    for rank in (1, 4, 16, 32, 48):
        yield f"rank {rank}", random(words, rank) @ random(rank, dim)
    for length in (2, 5, 10, 30, 100, 10_000):
        table = random(words, dim)
        table[77] *= length
        yield f"row {length}", table
        yield f"row {length} in a cone", table + 10 * direction
    yield "lengths", random(words, dim) * random(words, 1).exp()


@pytest.mark.parametrize("name, table", [pytest.param(*one, id=one[0]) for one in family()])
def test_no_headline_figure_is_denied(name, table):
    report = analyze(table)
    (one,) = report.to_dict()["checkpoints"]
    measures, random = one["measures"], one["random"]
    sentences = verdict(one)
    first, _, last = sentences
    assert len(sentences) == 3 and "e+" not in first
    edges = measures["sigma_over_edge_centred"]
    few = measures["effective_rank_centred"] < random["effective_rank_centred"] / 2
    common = max(measures["mean_share"] ** 2, measures["mean_cosine"])
    row = one["dominant_row"]
    assert row is None or name.startswith(("row", "lengths"))
    if common > 0.05:
        assert "narrow cone" in first or "share a direction" in first
    if common > 0.05 or edges > 1.2:
        assert "no direction that stands out" not in first
    if edges > 1.2:
        named = "of the rest (random" if row is None else f"row {row['row']} alone holds"
        assert named in first and "many directions" not in first
    if few and row is None:
        assert "few directions" in first
    if common > 0.05 or edges > 2 or few:
        assert "nothing to repair" not in last
    assert row is None or f"row {row['row']} first" in last
    norms = (table.double() - table.double().mean(0)).norm(dim=1)
    if norms.square().max() > norms.square().sum() / 3:
        share = float(norms.square().max() / norms.square().sum())
        assert row["row"] == 77 and row["share"] == pytest.approx(share, rel=1e-5)
