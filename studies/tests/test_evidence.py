"""The studies of docs/evidence.md: their plan, their scores, and one of them at a tiny size."""

import concurrent.futures
import dataclasses
import json
import math
import re

import pytest

from spectral_fairseq.errors import ConfigurationError, DataError
from studies import corpus, translation
from studies.evidence import (
    comparison,
    corpora,
    figures,
    gains,
    grid,
    overview,
    plan,
    report,
    results,
    scoring,
    training,
)
from studies.evidence.__main__ import RESULTS, main
from studies.evidence.grid import STUDIES, Setting
from studies.evidence.plan import stages
from studies.evidence.records import Records, records_of
from studies.evidence.study import StudyRunner, run_study
from studies.pages import with_generated
from studies.significance import paired_t
from studies.tables import Difference
from studies.training_data import OPENDOCS, language_model_data

TOY = dataclasses.replace(
    grid.TRANSLATION,
    rounds=(({"dropout": "0.1"}, {"dropout": "0.2"}), ({"lr": "0.004"},)),
    methods={name: grid.TRANSLATION.methods[name] for name in ("plain", "cosine", "simcut")},
    seeds=(11, 12),
)


def test_every_method_has_the_same_budget():
    for key, study in STUDIES.items():
        # Arms are starts of one table, optimisers or precisions, which are no methods.
        arms = ("start", "rate", "muon", "bfloat16")
        if key.startswith(tuple(f"translation_{arm}_" for arm in arms)):
            continue
        budget = {"small": 3, "medium": 4, "confirmation": 1, "long": 1}.get(
            key.rpartition("_")[2], 6
        )
        first, *others = study.methods
        assert first == "plain" and len(study.methods["plain"].settings) == 1
        for name in others:
            settings = study.methods[name].settings
            assert len(settings) == len(set(settings)) == budget, name
        assert study.tuning_seed not in study.seeds


def test_what_was_not_planned_is_among_what_is_compared():
    assert set(grid.UNPLANNED) <= set(STUDIES)
    for study in STUDIES.values():
        pairs = {(method, "plain") for method in study.methods} | set(comparison.contrasts(study))
        assert set(study.unplanned) <= pairs


def test_a_confirmation_has_the_settings_that_were_chosen_and_fresh_seeds():
    first, confirmation = STUDIES["transformer_lm_small"], STUDIES["transformer_lm_confirmation"]
    records = Records(RESULTS / "transformer_lm_small")
    *_, (_, choices) = stages(first, records, ["weight_norm_init"])
    assert confirmation.recipe == choices.recipe
    settings = confirmation.methods["weight_norm_init"].settings
    assert settings == (choices.settings["weight_norm_init"],)
    assert not set(confirmation.seeds) & {*first.seeds, first.tuning_seed}


def test_the_long_trainings_have_what_was_chosen_for_the_short_ones_and_tune_nothing():
    short, long = STUDIES["awd_lstm_decay_small"], STUDIES["awd_lstm_decay_long"]
    *_, (_, choices) = stages(short, Records(RESULTS / "awd_lstm_decay_small"))
    assert long.recipe == choices.recipe and long.seeds == short.seeds
    [(stage, chosen)] = stages(long, {})
    assert stage.name == "seed" and chosen.settings == choices.settings
    assert long.flags.replace("--max-epoch 100", "--max-epoch 50") == short.flags


def test_the_other_methods_share_the_frozen_recipe_and_the_trainings_of_plain():
    study = STUDIES["translation_methods_small"]
    first, shared = STUDIES[study.plain_of], Records(RESULTS / study.plain_of)
    *_, (_, choices) = stages(first, shared, ["weight_norm_init"])
    assert (study.recipe, study.flags, study.seeds) == (choices.recipe, first.flags, first.seeds)
    assert set(study.methods) & set(first.methods) == {"plain"}
    records = records_of(RESULTS, "translation_methods_small", study)
    for seed in (study.tuning_seed, *study.seeds):
        cell = plan.cell_of(study, study.recipe, "plain", Setting(), seed)
        assert records[cell.name] == shared[cell.name]
        if seed != study.tuning_seed:
            assert records.text(cell.name) == shared.text(cell.name)


@pytest.mark.parametrize("name", [name for name in STUDIES if "_rate_" in name or "_muon_" in name])
def test_rates_and_muon_stand_beside_trainings_of_plain_that_are_on_record(name):
    study = STUDIES[name]
    records = records_of(RESULTS, name, study)
    for seed in (study.tuning_seed, *study.seeds):
        assert plan.cell_of(study, study.recipe, "plain", Setting(), seed).name in records
    settings = [one.settings for key, one in study.methods.items() if key not in study.elsewhere]
    assert all(len(one) == len(set(one)) == (6 if study.tuned else 1) for one in settings)


def test_muon_has_the_settings_for_20_000_updates_that_5_000_have_chosen():
    short, long = STUDIES["translation_muon_small"], STUDIES["translation_muon_long"]
    (*_, (_, chosen)) = plan.stages(short, records_of(RESULTS, "translation_muon_small", short))
    for method in ("muon", "muon_init"):
        assert long.methods[method].settings == (chosen.settings[method],)


def test_a_method_that_was_removed_is_refused_before_anything_is_trained(tmp_path):
    runner = StudyRunner(TOY, None, None, Records(tmp_path), "cpu", 1)
    with pytest.raises(ConfigurationError, match="simcut, which commit 0bd1da41 has"):
        runner.run()


def test_records_of_runs_that_end_at_the_same_time_are_all_kept(tmp_path):
    def add(seeds):
        records = Records(tmp_path)
        for seed in seeds:
            cell = plan.cell_of(TOY, TOY.recipe, "plain", Setting(), seed)
            records.add(cell, {"valid_ppl": 2.0}, [f"line {seed}"])

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(add, (range(10), range(10, 20))))
    records = Records(tmp_path)
    assert sorted(records.text(name)[0] for name in records) == sorted(
        f"line {seed}" for seed in range(20)
    )


def test_settings_open_the_records_and_are_compared(tmp_path):
    cell = plan.cell_of(TOY, TOY.recipe, "plain", Setting(), 1)
    records = Records(tmp_path / "own")
    records.keep_settings({"flags": "--lr 1", "pairs": 5})
    records.add(cell, {"valid_ppl": 2.0}, None)
    first, second = (tmp_path / "own" / "records.jsonl").read_text("utf-8").splitlines()
    assert json.loads(first) == {"settings": {"flags": "--lr 1", "pairs": 5}}
    assert json.loads(second) == dict(Records(tmp_path / "own"))[cell.name]
    Records(tmp_path / "own").keep_settings({"flags": "--lr 1", "pairs": 5})
    sharing = Records(tmp_path / "other", shared=[tmp_path / "own"])
    for one in (Records(tmp_path / "own"), sharing):
        with pytest.raises(ConfigurationError, match="pairs 5 -> 6.*another --results"):
            one.keep_settings({"flags": "--lr 1", "pairs": 6})


def test_choices_follow_validation_and_each_freezes_what_comes_before():
    """The scores of a toy: a dropout of .2 and the first rate are best, and a weight of 10."""
    records = {}

    def score(cell):
        recipe = dict(cell.recipe)
        found = {"0.3": 10, "0.1": 9, "0.2": 12}[recipe["dropout"]]
        found -= recipe["lr"] == "0.004"
        return found + (cell.flags.endswith("--cosreg-weight 10"))

    reached = []
    for stage, choices in stages(TOY, records):
        reached.append((stage, choices))
        records.update({cell.name: {"valid_score": score(cell)} for cell in stage.cells})
    names = [(stage.name, len(stage.cells)) for stage, _ in reached]
    last, choices = reached[-1]
    assert names == [
        ("recipe", 3),
        ("recipe", 2),
        ("tuning", 13),
        ("seed", 6),
        ("simcut", 2),
    ]
    assert choices.recipe["dropout"] == "0.2" and choices.recipe["lr"] == "0.002"
    assert choices.settings["cosine"].flags == "--cosreg-weight 10"
    assert choices.table_method == "cosine"
    simcut = choices.settings["simcut"].flags
    assert all(f"--cosreg-weight 10 {simcut}" in cell.flags for cell in last.cells)
    assert [cell.seed for cell in last.cells] == [11, 12]
    # The plain training of the frozen recipe is that of the last round: it is done once.
    assert len(records) == 3 + 1 + 12 + 6 + 2


def test_a_plan_stops_where_a_record_is_missing_and_drops_what_always_diverged():
    assert [stage.name for stage, _ in stages(TOY, {})] == ["recipe"]
    records = {}
    for stage, _ in stages(TOY, records):
        for cell in stage.cells:
            diverged = {"diverged": True} if cell.method == "simcut" else {"valid_score": math.nan}
            records[cell.name] = {"valid_score": 1.0} if cell.method == "plain" else diverged
    assert {cell.method for cell in stage.cells} == {"plain"}


def test_methods_that_are_not_tuned_do_not_keep_others_from_the_tables():
    records = {}
    for stage, _ in stages(TOY, records, ["cosine"]):
        records.update({cell.name: {"valid_score": 1.0} for cell in stage.cells})
    every = list(stages(TOY, records))
    assert every[-1][0].name == "tuning"
    tuned = results.tuned_methods(every, records)
    assert tuned == ["cosine", "plain"]
    (*_, (last, _)) = stages(TOY, records, tuned)
    assert (last.name, {cell.method for cell in last.cells}) == ("seed", {"plain", "cosine"})


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_fairseq_takes_every_command(name, tmp_path):
    from fairseq import options

    import spectral_fairseq.plugin  # noqa: F401

    study = STUDIES[name]
    for method in set(study.methods) - set(grid.REMOVED):
        for setting in study.methods[method].settings:
            cell = plan.cell_of(study, study.recipe, method, setting, 1)
            command = training.train_command(study, cell, tmp_path, tmp_path, "cpu")
            parsed = options.parse_args_and_arch(options.get_training_parser(), command[1:])
            rate = float(study.recipe["lr"]) * setting.lr_factor
            assert parsed.lr == [pytest.approx(rate)]
    for changes in (change for tried in study.rounds for change in tried):
        cell = plan.cell_of(study, {**study.recipe, **changes}, "plain", Setting(), 1)
        command = training.train_command(study, cell, tmp_path, tmp_path, "cpu")
        options.parse_args_and_arch(options.get_training_parser(), command[1:])


def test_recall_by_how_often_training_has_a_word():
    training_text = ["rare often often."] + ["often"] * 8
    found = scoring.recall_by_band(
        ["new often often", "rare rare"], ["new often", "rare rare often."], training_text
    )
    # "often" 10 times; "rare", once; "." once, as the tokenizer cuts it off; "new", never.
    assert found == {"0": [1, 1], "1-9": [2, 3], "10-99": [1, 2], "100-": [0, 0]}


def test_bleu_of_summed_counts_is_that_of_the_corpus():
    from sacrebleu.metrics import BLEU

    found = ["the cat sat on the mat .", "a dog runs fast"]
    references = ["the cat sat on a mat .", "the dog runs very fast"]
    sums = scoring.bleu_counts(found, references).sum(0)
    assert scoring.bleu_of_sums(sums) == BLEU().corpus_score(found, [references]).score


def test_equal_translations_are_no_better():
    references = [f"the cat sat on the mat number {number} ." for number in range(20)]
    worse = [line.replace("sat on", "lies over") for line in references]
    assert comparison.paired_bootstrap(worse, references, references) < 0.05
    assert comparison.paired_bootstrap(worse, worse, references) == 1.0


def test_a_comparison_without_a_p_counts_as_one_that_was_not_made():
    assert overview.joint_p([math.nan, 0.03], 2)[1] == pytest.approx(0.06)
    assert overview.joint_p([0.03], 2) == [pytest.approx(0.06)]


def test_p_is_adjusted_for_what_is_planned_and_verdicts_need_all_seeds():
    study = dataclasses.replace(grid.TRANSLATION_SMALL, seeds=(1, 2, 3))
    lines = [f"the cat sat on the mat number {number} ." for number in range(30)]
    worse = [line.replace("sat on", "lies over") for line in lines]
    results = {
        "plain": {seed: {"bleu": 20.0 + seed} for seed in (1, 2, 3)},
        "better": {seed: {"bleu": 25.0 + 1.01 * seed} for seed in (1, 2, 3)},
        "unclear": {1: {"bleu": 30.0}, 2: {"bleu": 18.0}, 3: {"bleu": 24.5}},
        # Its small p must not make that of another comparison smaller.
        "unfinished": {1: {"bleu": 40.0}, 2: {"bleu": 41.001}},
    }
    translations = {
        method: {seed: lines if method == "better" else worse for seed in of}
        for method, of in results.items()
    }
    found = {one.method: one for one in comparison.compare(study, results, translations, lines)}
    assert comparison.planned_comparisons(study) == 6
    assert found["better"].adjusted_p == pytest.approx(6 * found["better"].test.p)
    assert found["better"].segments[1:] == (3, 0) and found["better"].segments.interval.low > 0
    assert found["better"].verdict(study) == "**a gain**"
    later = dataclasses.replace(study, unplanned=(("better", "plain"), ("unclear", "plain")))
    assert found["better"].verdict(later) == "a gain, not planned"
    assert found["unclear"].verdict(later) == "no claim"
    assert found["unclear"].verdict(study) == "no claim"
    assert found["unfinished"].verdict(study) == "no claim with 2 of 3 seeds"
    assert found["unfinished"].test.p < 1e-3 and math.isnan(found["unfinished"].adjusted_p)
    lower_is_better = dataclasses.replace(study, corpus="language_model")
    alone = found["better"]._replace(segments=None)
    assert alone.verdict(lower_is_better) == "**a loss**"


def test_without_plain_there_is_no_comparison():
    """Such as when each of its trainings diverged; it ended in ``KeyError: 'plain'``."""
    results = {"cosine": {600_000: {"test_ppl": 20.0}}}
    assert comparison.compare(grid.TRANSFORMER_LM_SMALL, results, {}, []) == []


def test_p_is_adjusted_over_the_studies_that_have_results():
    one = dataclasses.replace(grid.TRANSFORMER_LM_CONFIRMATION, seeds=(11, 12, 13))
    studies = {"full": one, "part": dataclasses.replace(one, seeds=(11, 12, 13, 14)), "none": one}
    ppl = {"plain": (150.0, 151.0, 152.0), "weight_norm_init": (148.0, 149.1, 149.9)}

    def records(study):
        made = {}
        for stage, _ in stages(study, made):
            for cell in stage.cells:
                found = {"method": cell.method, "stage": stage.name, "valid_score": -1.0}
                if cell.seed in (11, 12, 13):
                    found["test_ppl"] = ppl[cell.method][cell.seed - 11]
                if cell.seed != 14:
                    made[cell.name] = found
        return made

    found = overview.all_comparisons(
        studies, {"full": records(one), "part": records(studies["part"]), "none": {}}
    )
    # The second study lacks a seed, so its comparison counts as one that is still to be made.
    assert [(one.name, one.method) for one in found] == [("full", "weight-norm initialisation")]
    assert found[0].comparison.test.mean == pytest.approx(-2.0)
    assert found[0].comparison.adjusted_p == found[0].comparison.test.p
    assert found[0].joint_p == pytest.approx(2 * found[0].comparison.test.p)
    assert "Holm over all 2" in overview.together_table(found)


def compared(study, **bleu):
    """The comparisons of a study with three seeds, from the BLEU of each method by seed."""
    results = {
        method: {seed: {"bleu": value} for seed, value in enumerate(of, 1)}
        for method, of in bleu.items()
    }
    return comparison.compare(dataclasses.replace(study, seeds=(1, 2, 3)), results, {}, [])


def test_a_combination_is_compared_with_its_part_too():
    found = compared(
        grid.TRANSLATION_SMALL,
        plain=(20.0, 21.0, 22.0),
        simcut=(21.0, 22.5, 23.0),
        table_and_simcut=(23.0, 24.4, 25.1),
    )
    assert [(one.method, one.baseline) for one in found] == [
        ("simcut", "plain"),
        ("table_and_simcut", "plain"),
        ("table_and_simcut", "simcut"),
    ]
    assert found[-1].test.mean == pytest.approx(2.0)
    smallest = min(found, key=lambda one: one.test.p)
    assert smallest.adjusted_p == pytest.approx(6 * smallest.test.p)


def test_two_kinds_of_processors_are_not_compared():
    """Plain on one processor stood beside Muon on another."""
    study = dataclasses.replace(STUDIES["translation_muon_small"], seeds=(1, 2, 3))
    results = {
        method: {seed: {"bleu": bleu + seed**2, "versions.processor": name} for seed in study.seeds}
        for method, bleu, name in (
            ("plain", 20.0, "A"),
            ("muon", 22.0, "B"),
            ("muon_init", 25, "B"),
        )
    }
    found = {(one.method, one.baseline): one for one in compared_of(study, results)}
    refused = found["muon", "plain"]
    assert refused.is_refused and math.isnan(refused.test.mean)
    assert refused.verdict(study) == "refused: A against B"
    assert found["muon_init", "muon"].test.mean == pytest.approx(3.0)
    for one in results["plain"].values():  # older records name none
        del one["versions.processor"]
    assert not any(one.is_refused for one in compared_of(study, results))


def compared_of(study, results):
    return comparison.compare(study, results, {}, [])


def test_the_picture_of_gains_refuses_two_processors_and_derives_what_is_dark():
    mixed = gains.Gain("Muon", gains.MUON, "muon_init", gains.DECAY)
    with pytest.raises(DataError, match="AMD EPYC and Intel Xeon with AMX"):
        gains.difference(mixed)
    found = report.compared(RESULTS)
    rows = {row.text: row for _, group in gains.GROUPS for row in gains.rows_of(group, found)}
    dark = {text for text, row in rows.items() if row.claimed}
    joint = {(one.name, one.comparison.method): one.joint_p for one in found}
    assert (rows["SimCut, twice the time"].claimed) == (joint[gains.SMALL, "simcut"] < 0.05)
    assert "weight-norm regularisation, no decay" not in dark  # not planned
    more = [one._replace(joint_p=2 * one.joint_p) for one in found]
    again = [row for _, group in gains.GROUPS for row in gains.rows_of(group, more)]
    assert {row.text for row in again} == set(rows)
    assert {row.text for row in again if row.claimed} < dark


def test_the_picture_of_gains_has_multi30k_once_it_is_recorded():
    assert gains.rows_on_multi30k({}) == []
    compared = {
        ("a CPU", "W", "D"): Difference(paired_t([1.0, 1.1, 0.9, 1.0, 1.05]), 0.04),
        ("a CPU", "MW", "D"): Difference(paired_t([2.0, -1.0, 3.0, 0.0, 2.0]), 0.2),
        ("a GPU", "R", "D"): Difference(paired_t([1.5, 1.6, 1.4]), 0.001),
        ("a CPU", "MW", "W"): Difference(paired_t([5.0, 5.1, 5.2, 5.0, 5.1]), 0.001),
    }
    rows = gains.rows_on_multi30k(compared)
    assert [row.text for row in rows] == [
        "R-Drop, twice the time, a GPU",
        "Muon + initialisation, a CPU",
        "weight-norm initialisation, a CPU",
    ]
    assert [row.claimed for row in rows] == [False, False, True]  # R-Drop is no primary one


def test_contrasts_are_compared_once_both_methods_have_results():
    found = compared(
        STUDIES["translation_start_long"],
        plain=(20.0, 21.0, 22.1),
        weight_norm_init=(23.0, 24.1, 25.0),
        short_start=(21.0, 22.2, 22.9),
    )
    assert [(one.method, one.baseline) for one in found] == [
        ("short_start", "plain"),
        ("weight_norm_init", "plain"),
        ("weight_norm_init", "short_start"),
    ]
    assert found[-1].test.mean == pytest.approx(2.0)
    # Three methods with plain, and two contrasts, of which one has no results yet.
    smallest = min(found, key=lambda one: one.test.p)
    assert smallest.adjusted_p == pytest.approx(5 * smallest.test.p)


@pytest.mark.parametrize("arch", ["awd_lstm_wt2", "transformer_lm"])
def test_perplexity_of_rare_words(arch, train, tiny_lm_data):
    from spectral_fairseq.commands.lm_evaluation import evaluate_checkpoint
    from spectral_fairseq.commands.lm_options import EvaluationOptions
    from tests.language_models import perplexity_of_fairseq, tokens_of

    more = ("--task", "stateful_language_modeling", "--batch-size", "4", "--decoder-embed-dim", "8")
    more += ("--decoder-hidden-size", "12")
    folder = train(arch, "mle_cosreg", *(more if arch == "awd_lstm_wt2" else ()))
    checkpoint = folder / "checkpoint_best.pt"
    found = scoring.perplexities(checkpoint, tiny_lm_data, "test", streams=2)
    if arch == "awd_lstm_wt2":
        options = EvaluationOptions(subset="test", streams=2)
        whole = evaluate_checkpoint(checkpoint, tiny_lm_data, options)["figures"][0]["perplexity"]
    else:
        whole = perplexity_of_fairseq(checkpoint, tiny_lm_data, "test", 16, 8)
    assert found["test_ppl"] == pytest.approx(whole, rel=1e-4)
    bands = found["bands"]
    tokens = len(tokens_of(tiny_lm_data, "test"))
    assert bands["1-9"][1] > 0 and sum(words for _, words in bands.values()) == tokens
    rare, number = bands["1-9"]
    assert found["rare_test_ppl"] == pytest.approx(math.exp(rare / number), rel=1e-3)


def test_text_of_language_models_is_shortened_towards_validation(tmp_path, monkeypatch):
    import studies.training_data

    made = []
    monkeypatch.setattr(studies.training_data, "_preprocess", lambda *flags: made.append(flags))
    for split in ("train", "valid"):
        (tmp_path / f"{split}.tokens").write_text("a b\nc d e\nf\n")
    language_model_data(tmp_path / "out", tmp_path, tokens={"train": 3, "valid": 2})
    kept = [tmp_path / "out" / "tokens" / f"{split}.tokens" for split in ("train", "valid")]
    assert [path.read_text() for path in kept] == ["c d e\nf\n", "a b\n"]
    assert str(tmp_path / "out" / "tokens" / "train.tokens") in made[0]


def small_text(folder):
    whole = folder / "whole"
    corpus.unpack(OPENDOCS, whole)
    for split, count in {"train": 60, "valid": 9, "test": 9}.items():
        for language in ("de", "en"):
            lines = corpus.read_lines(whole / f"{split}.{language}")[:count]
            (folder / f"{split}.{language}").write_text("".join(f"{x}\n" for x in lines), "utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("own_process", "forked_commands")
def test_a_study_from_text_to_tables(tmp_path, capsys, monkeypatch):
    """Two methods, two seeds; one setting diverges. The second run finds all done."""
    tiny = grid.TRANSLATION.flags.replace("dim 128", "dim 16").replace("dim 256", "dim 16")
    tiny = tiny.replace("layers 3", "layers 1").replace("--max-epoch 200", "--max-epoch 2")
    cosine = grid.TRANSLATION.methods["cosine"]
    study = dataclasses.replace(
        TOY,
        flags=f"{tiny} --max-tokens 600",
        recipe={**TOY.recipe, "subwords": "400"},
        rounds=(),
        methods={
            "plain": grid.PLAIN,
            "cosine": dataclasses.replace(
                cosine, settings=(cosine.settings[0], Setting("--warmup-updates 1", 1e30))
            ),
        },
        with_simcut=False,
        length_penalties=(0.5, 1.0, 2.0),
    )
    source = tmp_path / "source"
    source.mkdir()
    others = tmp_path / "others"
    others.mkdir()
    for name, number in (("games", 3), ("mail", 2)):
        (others / f"{name}.de").write_text("Das ist ein Satz .\n" * number)
        (others / f"{name}.en").write_text("This is a sentence .\n" * number)
    text = corpora.TranslationCorpus(
        tmp_path / "work" / "data", 50, small_text(source), corpora.other_tests(others)
    )
    where = {"work_dir": tmp_path / "work", "results": tmp_path / "results"}
    records = run_study("translation", study, text, device="cpu", at_once=2, **where)
    sharing = dataclasses.replace(study, plain_of="translation")
    done = run_study("sharing", sharing, text, device="cpu", at_once=2, methods=["plain"], **where)
    assert {name: records[name] for name in done} == dict(done) and len(done) == 3
    assert not list((tmp_path / "results" / "sharing").glob("plain*"))
    other = corpora.TranslationCorpus(tmp_path / "work" / "data", 40, tmp_path / "source")
    with pytest.raises(ConfigurationError, match="pairs"):  # plain was trained on another text
        run_study("other", sharing, other, device="cpu", at_once=2, **where)
    capsys.readouterr()
    assert [record.get("diverged", False) for record in records.values()].count(True) == 1
    assert len(records) == 3 + 4
    assert not list((tmp_path / "work").rglob("checkpoint*.pt"))
    tuned = [record for record in records.values() if record["stage"] == "tuning"]
    assert all("bleu" not in record for record in tuned)  # the test set is left alone
    tested = [record for record in records.values() if record["stage"] == "seed"]
    assert all(set(record["other_tests"]) == {"games", "mail"} for record in tested)
    assert all(record["length_penalty"] in study.length_penalties for record in tested)
    assert all(set(one["other_tests"]["mail"]) >= {"bleu", "chrf", "ter"} for one in tested)
    assert (len(corpus.read_lines(text.root / "subwords-400" / "text" / "train.de"))) == 50

    folder = tmp_path / "results" / "translation"
    again = Records(folder)
    assert dict(again) == json.loads(json.dumps(dict(records)))
    monkeypatch.setattr("studies.evidence.study.run_jobs", None)  # nothing is run again
    run_study("translation", study, text, device="cpu", at_once=2, **where)

    written = report.section("translation", study, again)
    assert "tuning of the methods 3 of 3; seeds of the tables 4 of 4." in written
    assert "Trainings of cosine regularisation that diverged: 1." in written
    assert "TER minus plain's" in written and "95 %, seeds and segments" in written
    rows = [line.split("|")[1:3] for line in written.splitlines() if line.startswith("|")]
    found = [(one.strip(), method.strip()) for one, method in rows]
    order = [
        (test, method)
        for test in ("games", "mail")
        for method in ("plain", "cosine regularisation")
    ]
    assert [row for row in found if row in order] == order
    assert "| cosine regularisation |       2 |" in written and "p, Holm over 1" in written
    assert figures.draw_curves("translation", again, tmp_path / "images")
    page = tmp_path / "page.md"
    page.write_text("<!-- generated: plan -->\nold\n<!-- /generated -->\n")
    monkeypatch.setattr(report, "STUDIES", {"translation": study})
    report.write_pages(tmp_path / "results", [page], tmp_path / "images")
    assert "`translation`" in page.read_text() and "old" not in page.read_text()


@pytest.mark.slow
def test_a_length_penalty_chooses_as_beam_search_does(
    train, run_cli, tiny_translation_data, tmp_path
):
    trained = train(
        "transformer", "label_smoothed_cross_entropy", *"--lr 0.01 --max-epoch 20".split()
    )
    path = trained / "checkpoint_last.pt"
    common = ("fairseq-generate", tiny_translation_data, "--user-dir", translation.USER_DIR)
    common += ("--path", path, "--cpu", "--beam", "4", "--max-len-b", "12")
    log, found = tmp_path / "log", []
    several = run_cli(*common, "--nbest", "4").stdout
    count = len(re.findall(r"^S-", several, re.MULTILINE))
    for penalty in (-1.0, 3.0):
        log.write_text(several, "utf-8")
        found.append(translation.read_translations(log, count, penalty))
        log.write_text(run_cli(*common, "--lenpen", penalty).stdout, "utf-8")
        assert found[-1] == translation.read_translations(log, count)
    assert found[0] != found[1]


@pytest.mark.slow
@pytest.mark.usefixtures("own_process", "forked_commands")
def test_a_study_of_language_models(tmp_path, tiny_lm_data, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    for split in corpora.SPLITS:
        (source / f"{split}.tokens").write_text((tiny_lm_data / f"{split}.txt").read_text())
    tiny = grid.AWD_LSTM.flags.replace("128", "8").replace("256", "12").replace("200", "2")
    tiny = tiny.replace("size 20", "size 4").replace("sample 35", "sample 10")
    study = dataclasses.replace(
        grid.AWD_LSTM, flags=tiny, rounds=(), methods={"plain": grid.PLAIN}, seeds=(11,)
    )
    text = corpora.LanguageModelCorpus(tmp_path / "work" / "data", source, words=200)
    monkeypatch.setattr(scoring.perplexities, "__defaults__", (2,))  # streams of a short text
    records = run_study(
        *("awd_lstm", study, text),
        **{"work_dir": tmp_path / "work", "results": tmp_path / "results"},
        **{"device": "cpu", "at_once": 1},
    )
    tuned, tested = sorted(records.values(), key=lambda record: record["seed"])
    assert tuned["valid_score"] == -tuned["valid_ppl"] and "test_ppl" not in tuned
    assert tuned["device"] == "cpu"
    assert tested["test_ppl"] > 1 and tested["mean_cosine"] and len(tested["curve"]) == 2
    written = report.section("awd_lstm", study, records)
    assert f"{tested['test_ppl']:.2f}" in written


def test_the_pages_have_what_the_results_say():
    pages = [page.read_text("utf-8") for page in report.PAGES]
    for page in pages:
        assert with_generated(page, lambda name: report.part(name, RESULTS)) == page
    for name in (*STUDIES, "plan", "grid", "seeds", "together"):
        assert sum(f"<!-- generated: {name} -->" in page for page in pages) == 1


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"mail.de": "a\n"},
        {"mail.de": "a\n", "mail.en": "a\nb\n"},
        {"mail.de": "", "mail.en": ""},
        {"test.de": "a\n", "test.en": "a\n"},
        {"a,b.de": "a\n", "a,b.en": "a\n"},
    ],
)
def test_other_tests_that_cannot_be_used_are_refused(files, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError):
        corpora.other_tests(tmp_path)


def test_flags_of_translation_are_refused_elsewhere(capsys):
    with pytest.raises(SystemExit):
        main(["awd_lstm", "--other-tests", "others"])
    assert "expected a study of translation" in capsys.readouterr().err


def test_unknown_methods_are_refused_at_once(capsys):
    with pytest.raises(SystemExit):
        main(["awd_lstm", "--methods", "simcut"])
    assert "found simcut" in capsys.readouterr().err
