"""The table of results: means and spreads, differences seed by seed, what cannot be compared."""

import io
import json
import math
import sys

import pytest

from spectral_fairseq.errors import DataError
from studies import tables
from studies.training_log import read_training_log

SIGNATURE = "BLEU|tok:13a"


def add(folder, method, seed, **figures):
    path = folder / method / f"seed-{seed}"
    path.mkdir(parents=True)
    (path / "figures.json").write_text(json.dumps({"bleu_signature": SIGNATURE, **figures}))
    return path


def rows_of(text):
    """Cells of a Markdown table, its headings first."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


@pytest.fixture
def runs(tmp_path):
    for method, scores in {"plain": (10.0, 12.0), "sc": (11.5, 12.5)}.items():
        for seed, score in enumerate(scores, 1):
            add(tmp_path, method, seed, bleu=score, isotropy_as_is={"I1_both_signs": score / 100})
    return tmp_path


def test_mean_spread_and_paired_differences(runs):
    rows = tables.summary(tables.read(runs), "plain")
    assert list(rows) == ["plain", "sc"]
    of, difference = rows["sc"]["bleu"]["of"], rows["sc"]["bleu"]["difference"]
    assert (of.mean, of.seeds) == (12.0, 2) and of.deviation == pytest.approx(0.5**0.5)
    # +1.5 and +0.5: their spread is not that of the scores.
    assert difference.mean == 1.0 and difference.deviation == pytest.approx(0.5**0.5)
    assert rows["plain"]["bleu"]["difference"] is None
    text = tables.markdown(tables.read(runs), "plain")
    assert ["sc", "2", "12.0 ± 0.7", "+1.0 ± 0.7", "0.120 ± 0.007"] in rows_of(text)
    assert text.count(SIGNATURE) == 1


def test_numbers_in_names_are_sorted_as_numbers(tmp_path):
    for name in ("mos-15", "softmax", "mos-3"):
        add(tmp_path, name, 1, bleu=1.0)
    assert list(tables.summary(tables.read(tmp_path), "softmax")) == ["softmax", "mos-3", "mos-15"]


@pytest.mark.parametrize(
    "options, message",
    [
        (("--baseline", "plian"), "only plain, sc"),
        (("--columns", "bleu", "chrf"), "with chrf"),
        (("--columns", "chrf", "--format", "json"), "with chrf"),
    ],
)
def test_what_no_run_has_is_refused(options, message, runs, capsys):
    assert tables.main([str(runs), *options]) == 1
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""


def test_runs_without_a_figure_to_show(tmp_path, capsys):
    for method in ("plain", "sc"):
        add(tmp_path, method, 1, minutes=3)
    assert tables.main([str(tmp_path), "--baseline", "plain"]) == 1
    assert "Evaluate the runs anew" in capsys.readouterr().err


def test_one_seed_has_no_spread_and_unpaired_seeds_no_difference(tmp_path):
    add(tmp_path, "plain", 1, bleu=10)
    add(tmp_path, "sc", 2, bleu=11)
    text = tables.markdown(tables.read(tmp_path), "plain")
    rows = rows_of(text)
    assert ["plain", "1", "10.0"] in [row[:3] for row in rows]
    assert ["sc", "1", "11.0", ""] in [row[:4] for row in rows]
    assert "nan" not in text


def test_unfinished_runs_are_left_out_and_logs_are_read(runs):
    record = {"valid_loss": "4", "valid_nll_loss": "3", "valid_num_updates": "30"}
    log = '| INFO | train_inner | {"num_updates": "10", "ups": "4", "ppl": "9"}\n' + (
        f"| INFO | valid | {json.dumps(record)}\n"
    )
    (runs / "plain" / "seed-1" / "train.log").write_text(log)
    (runs / "mos" / "seed-1").mkdir(parents=True)
    (runs / "mos" / "seed-1" / "train.log").write_text(log)
    results = tables.read(runs)
    assert "mos" not in results
    assert results["plain"][1]["valid_ppl"] == 8.0
    assert results["plain"][1]["seconds_per_update"] == 0.25


@pytest.mark.parametrize("figures", [{"bleu_signature": "BLEU|tok:none"}, {"updates": 7}])
def test_what_cannot_be_compared_is_refused(tmp_path, figures):
    add(tmp_path, "plain", 1, bleu=10, updates=6)
    add(tmp_path, "sc", 1, **{"bleu": 11, "updates": 6, **figures})
    with pytest.raises(DataError, match="one (bleu_signature|updates) in all runs"):
        tables.read(tmp_path)


def test_empty_and_damaged_folders_are_named(tmp_path):
    with pytest.raises(DataError, match="figures.json"):
        tables.read(tmp_path)
    (add(tmp_path, "plain", 1) / "figures.json").write_text("{")
    with pytest.raises(DataError, match="seed-1"):
        tables.read(tmp_path)


def test_command_prints_json_and_refuses_in_one_line(runs, tmp_path_factory, capsys):
    assert tables.main([str(runs), "--baseline", "plain", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sc"]["bleu"]["difference"]["mean"] == 1.0
    assert tables.main([str(tmp_path_factory.mktemp("empty"))]) == 1
    assert capsys.readouterr().err.startswith("error: expected")


def test_a_training_on_the_cpu_of_a_host_with_a_gpu_is_none_of_the_gpu(tmp_path):
    on = {"processor": "a Xeon", "gpu": "a GPU"}
    wheres = {"plain": {"device": "cpu"}, "cuda": {"device": "cuda"}}
    wheres.update(old={}, opendocs={"settings": {"device": "cpu"}})
    for method, where in wheres.items():
        for seed in (1, 2):
            add(tmp_path, method, seed, bleu=float(seed), versions=on, **where)
    results = tables.read(tmp_path)
    assert [tables.machines(results, method) for method in wheres] == [
        *(["a Xeon"], ["a GPU"], ["a GPU"], ["a Xeon"])
    ]
    compared = tables.summary(results, "plain")
    assert compared["cuda"]["bleu"]["difference"] is None
    assert compared["opendocs"]["bleu"]["difference"].seeds == 2


@pytest.mark.parametrize(
    "bits, best, ppl",
    [(["nan", "3", "4"], 20, 8.0), (["3", "nan"], 10, 8.0), (["1100"], 10, math.inf)],
)
def test_the_log_of_a_training_that_diverges(bits, best, ppl, tmp_path):
    lines = ['| INFO | train_inner | {"num_updates": "10", "ups": "4", "ppl": "9"}']
    for epoch, value in enumerate(bits, 1):
        figures = {"valid_loss": value, "valid_nll_loss": value, "valid_num_updates": 10 * epoch}
        lines.append(f"| INFO | valid | {json.dumps(figures)}")
    (tmp_path / "train.log").write_text("\n".join(lines))
    found = read_training_log(tmp_path / "train.log")
    assert (found["best_update"], found["valid_ppl"]) == (best, ppl)


def test_opposite_infinities_have_no_mean(tmp_path):
    for name, signs in (("plain", (0, 0)), ("sc", (math.inf, -math.inf))):
        for seed, value in enumerate(signs, 1):
            add(tmp_path, name, seed, valid_ppl=value)
    assert math.isnan(tables.summary(tables.read(tmp_path))["sc"]["valid_ppl"]["of"].mean)


def test_diverged_runs_have_a_mean_and_no_spread(tmp_path, capsys):
    for seed, ppl in enumerate((math.inf, math.inf, 3.0), 1):
        add(tmp_path, "plain", seed, bleu=float(seed), valid_ppl=ppl)
    (row,) = rows_of(tables.markdown(tables.read(tmp_path)))[2:]
    assert row[2:4] == ["2.0 ± 1.0", "inf"]
    assert tables.main([str(tmp_path), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["plain"]["valid_ppl"]["of"]
    assert found == {"mean": None, "standard_deviation": None, "seeds": 3}


def test_a_figure_that_is_no_number_is_named(tmp_path):
    add(tmp_path, "plain", 1, bleu="high")
    with pytest.raises(DataError, match="a number as bleu in .*seed-1"):
        tables.read(tmp_path)


def test_a_terminal_without_the_letters_is_no_error(runs, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert tables.main([str(runs)]) == 0
    terminal.flush()
    assert b"12.0 \\xb1 0.7" in terminal.buffer.getvalue()


def test_differences_are_tested_and_corrected_for_their_number(runs, capsys):
    for seed, score in enumerate((9.0, 12.0), 1):
        add(runs, "mos", seed, bleu=score)
    add(runs, "once", 1, bleu=11.0)  # one seed: no interval
    rows = rows_of(tables.markdown(tables.read(runs), "plain", ["bleu"], test=True))
    assert rows[0][3:6] == ["sacreBLEU minus plain's", "95 % interval", "p (Holm)"]
    # +1.5 and +0.5: t is 2 with one degree of freedom, p = 1 - 2 atan(2)/pi = .295, twice that.
    assert ["sc", "2", "12.0 ± 0.7", "+1.0 ± 0.7", "-5.4 to 7.4", "0.590"] in rows
    # -1 and 0: t is 1, p = .5; the larger of two stays as it is, but not below the smaller.
    assert ["mos", "2", "10.5 ± 2.1", "-0.5 ± 0.7", "-6.9 to 5.9", "0.590"] in rows
    assert ["once", "1", "11.0", "+1.0", "", ""] in rows
    assert tables.main([str(runs), "--baseline", "plain", "--test", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sc"]["bleu"]["test"]["adjusted_p"] == pytest.approx(0.590, abs=5e-4)
    assert found["once"]["bleu"]["test"]["low"] is None
    with pytest.raises(SystemExit):
        tables.main([str(runs), "--test"])
    assert "expected --baseline with --test" in capsys.readouterr().err
