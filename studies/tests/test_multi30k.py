"""The study of Multi30k: its plan, its choices, and one of its trainings at a tiny size."""

import itertools
import json

import pytest

from studies import multi30k, multi30k_plan
from studies.multi30k_plan import FINALS, SEEDS, TUNING_SEED, UPDATES, Plan
from studies.pages import with_generated
from studies.training_data import ROOT

NAMES = {"W": "Weight-norm initialisation", "MW": "Muon with the weight-norm initialisation"}


def record(bleu, seed=TUNING_SEED, processor="one", seconds=100.0):
    return {
        "valid_bleu": bleu,
        "seed": seed,
        "device": "cpu",
        "processor_seconds": seconds,
        "valid_ppl": 5.0,
        "tests": {
            name: dict.fromkeys(multi30k_plan.SCORES, bleu) for name in ("2016", "2017", "coco")
        },
        "versions": {"processor": processor},
    }


def finished(score, **given):
    """Records of all that the plan has in the end, each with the BLEU that ``score`` gives it."""
    records = {}
    while True:
        due = Plan(records).due()
        if not due:
            return records
        records.update({one.name: record(score(one), one.seed, **given) for one in due})


def by_options(**best):
    """A score that is highest where a training has these options."""

    def score(one):
        return 40 - sum(abs(dict(one.options).get(name, 0) - of) for name, of in best.items())

    return score


def test_every_training_has_the_published_batch_and_bfloat16():
    words = multi30k.RECIPE.split()
    assert words[words.index("--max-tokens") + 1] == "4096"
    assert words[words.index("--update-freq") + 1] == "2"
    assert {"--bf16", "--fast-dropout"} <= set(words)
    assert all("--max-tokens" not in arm.flags for arm in multi30k_plan.ARMS.values())


@pytest.mark.parametrize(
    ("best", "sigma", "decay"),
    [({}, 0.1, 0.2), ({"sigma": 0.05}, 0.05, 0), ({"decay": 0.4}, 0.1, 0.4)],
)
def test_no_arm_has_more_trials_than_plain_and_two(best, sigma, decay):
    plan = Plan(finished(by_options(**{"sigma": sigma, "decay": decay, **best})))
    tried = {letter: len(plan.steps[f"tuning of {letter}"]) for letter in FINALS}
    assert tried["D"] >= 4 and max(tried.values()) <= tried["D"] + 2
    options = dict(plan.chosen["W"].options)
    assert (options["sigma"], options.get("decay", 0)) == (sigma, decay)


def test_an_end_that_wins_is_followed_by_one_step_outwards():
    records = finished(by_options(decay=0.8, lr=0.0025))
    assert dict(Plan(records).chosen["D"].options) == {"decay": 0.8}
    assert not any("decay1.6" in name for name in records)
    assert dict(Plan(records).chosen["MW"].options)["lr"] == 0.0025


def test_the_finals_have_seeds_that_no_choice_had_and_wait_for_their_own_choice():
    records = finished(by_options(decay=0.1))
    plan = Plan(records)
    finals = plan.steps["finals"]
    assert {one.seed for one in finals} == set(SEEDS) and TUNING_SEED not in SEEDS
    assert len(finals) == 4 * 5 and len(plan.steps["R-Drop"]) == 3
    tuned = {name: one for name, one in records.items() if one["seed"] == TUNING_SEED}
    last = plan.chosen["MW"].name
    without = Plan({name: one for name, one in tuned.items() if name != last})
    due = [one for one in without.due() if one.seed in SEEDS]
    assert last in {one.name for one in without.due()} and "equal time" not in without.steps
    assert {one.arm for one in due} == {"plain", "wn_init", "muon", "rdrop_1"}


def test_plain_takes_as_long_as_muon_with_the_initialisation():
    records = finished(by_options(decay=0.1))
    for name, one in records.items():
        if name.startswith("muon_wn_init"):
            one["processor_seconds"] *= 1.3
    del records[Plan(records).arms["D"][0].name]["processor_seconds"]  # it was interrupted
    longer = Plan(records).steps["equal time"]
    assert len(longer) == 3 and {one.updates for one in longer} == {62 * round(1.3 * UPDATES / 62)}


def test_a_page_is_written_of_records_that_lack_a_score_or_their_time():
    records = finished(by_options(decay=0.1))
    for one in records.values():
        one.pop("processor_seconds")
    del records[Plan(records).arms["W"][0].name]["tests"]["coco"]["raw_chrf"]
    plan = Plan(records)
    assert "equal time" not in plan.steps
    assert ("W", "D") in plan.comparisons(multi30k_plan.PRIMARY)
    assert ("W", "D") not in plan.comparisons(multi30k_plan.PRIMARY, "raw_chrf")
    assert "W − D, primary" in multi30k_plan.comparison_table(plan)


def test_primary_comparisons_are_adjusted_for_two():
    noise = itertools.cycle([0.0, 0.1, -0.1, 0.05])
    plan = Plan(finished(lambda one: 40 + ("wn" in one.arm) + next(noise)))
    found = plan.comparisons(multi30k_plan.PRIMARY)
    assert set(found) == {("W", "D"), ("MW", "D")}
    smallest = min(found.values(), key=lambda one: one.test.p)
    assert smallest.adjusted_p == pytest.approx(2 * smallest.test.p)
    text = multi30k_plan.comparison_table(plan)
    assert "W − D, primary" in text and "MW − D, as long, secondary" in text
    assert plan.time_ratio("MW", "D") == 1.0 and "1.00" in text


def test_two_kinds_of_processors_are_not_compared():
    records = finished(by_options(decay=0.1))
    records[Plan(records).arms["W"][0].name]["versions"]["processor"] = "another"
    found = Plan(records).comparisons(multi30k_plan.PRIMARY)
    assert found["W", "D"].test.mean != found["W", "D"].test.mean  # no number at all
    assert found["MW", "D"].test.mean == found["MW", "D"].test.mean


def test_a_control_that_moves_validation_gets_fresh_seeds():
    plan = Plan(finished(lambda one: 39.0 if one.arm == "no_smoothing" else 40.0))
    assert {one.arm for one in plan.steps["controls, more seeds"]} == {"plain", "no_smoothing"}


def test_the_figures_of_the_primary_comparisons_stand_in_the_evidence():
    text = (ROOT / "docs" / "evidence.md").read_text("utf-8").replace("&nbsp;", " ")
    plan = multi30k.plans(multi30k.records())["AMD EPYC (family 25, model 17)"]
    for (label, _), (test, p) in plan.comparisons(multi30k_plan.PRIMARY).items():
        interval = f"({test.low:.2f} to {test.high:.2f}; p {p:.3f}"
        assert f"- **{NAMES[label]}: {test.mean:+.2f}** {interval}" in text
        assert p < 0.05  # which the bold type says


def test_the_page_has_what_the_program_says():
    page = multi30k.PAGE.read_text("utf-8")
    assert with_generated(page, multi30k.part) == page
    assert all(f"{seed}" in page for seed in (SEEDS[0], SEEDS[-1]))


def test_each_kind_of_machine_has_a_plan_of_its_own():
    chosen = finished(by_options(decay=0.1), processor="one")
    begun = {"plain_2500_1": record(39.0, processor="two")}
    on_gpu = {**record(41.0), "device": "cuda", "versions": {"gpu": "a GPU"}}
    recorded = [
        {**one, "name": f"{name}_{one['device']}"}
        for some in (chosen, begun, {"wn_init_sigma0.1_decay0.1_2500_2100000": on_gpu})
        for name, one in some.items()
    ]
    plans = multi30k.plans([*recorded, {"name": "from_before_the_plan"}])
    assert set(plans) == {"one", "two", "a GPU"}
    assert not plans["one"].due() and set(plans["two"].records) == {"plain_2500_1"}
    assert "finals" not in plans["two"].steps
    # A GPU takes the settings of the CPU that has chosen all of them, and none of its finals.
    settings = {letter: plans["one"].chosen[letter] for letter in FINALS}
    assert {letter: plans["a GPU"].chosen[letter] for letter in FINALS} == settings
    assert len(plans["a GPU"].due()) > len(FINALS) * len(SEEDS) - 2


def test_a_training_that_is_not_due_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(multi30k, "RECORDS", tmp_path / "records.jsonl")
    monkeypatch.setattr(multi30k, "check_installation", lambda modules: None)
    where = ["--data", str(tmp_path), "--text", str(tmp_path)]
    assert multi30k.main(["wn_init_2500_7", *where]) == 1
    assert "found wn_init_2500_7" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("own_process", "forked_commands")
def test_one_training_from_data_to_record(tiny_translation_data, tmp_path, capsys, monkeypatch):
    records = tmp_path / "records.jsonl"
    monkeypatch.setattr(multi30k, "RECORDS", records)
    monkeypatch.setattr(multi30k, "TEST_SETS", (("test", "test", "test"),))
    small = multi30k.RECIPE.replace("layers 4", "layers 1").replace("dim 128", "dim 8")
    monkeypatch.setattr(multi30k, "RECIPE", small.replace("dim 256", "dim 8"))
    monkeypatch.setattr(multi30k, "TO_ZERO", "--max-epoch 5 --keep-last-epochs 5")
    data = str(tiny_translation_data)
    where = ["--data", data, "--text", data, "--raw", data, "--work-dir", str(tmp_path)]
    assert multi30k.main(["plain_2500_1", *where]) == 0
    [found] = [json.loads(line) for line in records.read_text("utf-8").splitlines()]
    assert found["name"] == "plain_2500_1_cpu" and found["device"] == "cpu"
    assert found["versions"]["processor"] and "processor_seconds" in found
    assert len(found["tests"]["test"]["translations"]) == 7
    assert "raw_chrf" in found["tests"]["test"]
    capsys.readouterr()
    assert multi30k.main(["plain_2500_1", *where]) == 0  # nothing is done again
    assert "is recorded" in capsys.readouterr().out
    found["versions"]["processor"] = "another"
    records.write_text(json.dumps(found) + "\n", "utf-8")
    assert multi30k.main(["due"]) == 0  # another kind of machine has a plan of its own
    assert "plain_2500_1\n" in capsys.readouterr().out
    assert "On another:" in multi30k.part("trainings")
