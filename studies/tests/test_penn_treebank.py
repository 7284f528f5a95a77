"""The study of Penn Treebank: its recipe is the page's, its records and tables follow from logs."""

import json
import re
import shlex

import pytest

from studies import penn_treebank
from studies.pages import with_generated


def one(arm, seed, epoch, ppl, processor="AMD EPYC"):
    versions = {"processor": processor}
    return {"arm": arm, "seed": seed, "epoch": epoch, "valid_ppl": ppl, "versions": versions}


def cells(row):
    return [cell.strip() for cell in row.split("|")[1:-1]]


def pairs(flags):
    words = shlex.split(flags)
    return dict(zip(words[::2], words[1::2]))


def test_the_recipe_is_that_of_the_page():
    page = penn_treebank.PAGE.read_text("utf-8")
    joined = page.replace("\\\n", " ")
    for arm, flags in penn_treebank.ARMS.items():
        [own] = re.findall(rf"^mos {arm} (.*)", joined, re.MULTILINE)
        assert pairs(own) == pairs(flags)
    [function] = re.findall(r"^mos\(\) \{.*\n(.*)\n\}", joined, re.MULTILINE)
    common = f"{penn_treebank.RECIPE} --seed {penn_treebank.SEEDS[0]}"
    assert set(shlex.split(common)) <= set(shlex.split(function))


def test_the_page_has_what_the_program_says():
    page = penn_treebank.PAGE.read_text("utf-8")
    assert with_generated(page, penn_treebank.part) == page


def test_arms_are_compared_over_the_same_seeds_and_machine_alone():
    reported = ["1", "180.72", "162.18", "10.3 %"]
    recorded = [one("mos", seed, 1, ppl) for seed, ppl in ((28, 200.0), (1028, 220.0))]
    recorded.append(one("mos_weight_norm_init", 28, 1, 189.0))
    recorded.append(one("mos_weight_norm_init", 1028, 1, 189.0, "another"))
    first, second = penn_treebank.epochs_table(recorded).splitlines()[2:4]
    found = ["210.00 (2 seeds)", "189.00 (one seed)", "", "AMD EPYC"]
    assert cells(first) == [*reported, *found]
    assert cells(second) == [*reported, "", "189.00 (one seed)", "", "another"]
    recorded[-1] = one("mos_weight_norm_init", 1028, 1, 189.0)
    assert cells(penn_treebank.epochs_table(recorded).splitlines()[2])[-2] == "10.0 %"


@pytest.mark.slow
@pytest.mark.usefixtures("own_process", "forked_commands")
def test_a_training_goes_on_where_more_epochs_are_asked_for(
    tiny_lm_data, tmp_path, capsys, monkeypatch
):
    records = tmp_path / "records.jsonl"
    monkeypatch.setattr(penn_treebank, "RECORDS", records)
    small = "--decoder-embed-dim 8 --decoder-hidden-size 8 --decoder-last-hidden-size 8"
    small += " --mixture-components 2 --batch-size 4 --tokens-per-sample 16"
    monkeypatch.setitem(penn_treebank.ARMS, "mos", f"{penn_treebank.ARMS['mos']} {small}")
    command = ["mos_28", "--data", str(tiny_lm_data), "--work-dir", str(tmp_path)]
    assert penn_treebank.main(command) == 0
    assert "epoch 1, validation perplexity" in capsys.readouterr().out
    first = records.read_text("utf-8")
    assert penn_treebank.main([*command, "--epochs", "3"]) == 0
    lines = records.read_text("utf-8")
    assert lines.startswith(first)
    found = [json.loads(line) for line in lines.splitlines()]
    assert [each["epoch"] for each in found] == [1, 2, 3]
    assert ["test_ppl" in each for each in found] == [True, False, True]
    # The programs of tests run in another process than the one whose time is taken: about zero.
    assert ["processor_seconds" in each for each in found] == [True, False, True]
    assert all(each["valid_ppl"] > 1 and each["versions"]["processor"] for each in found)
    assert penn_treebank.trainings_table(found).count("mos_28") == 2
    capsys.readouterr()
    with monkeypatch.context() as patched:
        patched.setattr(penn_treebank, "run_jobs", None)  # nothing is done again
        assert penn_treebank.main([*command, "--epochs", "3"]) == 0
    assert "is recorded to epoch 3" in capsys.readouterr().out
    assert records.read_text("utf-8") == lines
    for each in found:  # those of another machine are other trainings
        each["versions"]["processor"] = "another"
    records.write_text("".join(f"{json.dumps(each)}\n" for each in found), "utf-8")
    assert penn_treebank.main([*command, "--epochs", "3"]) == 0
    assert len(records.read_text("utf-8").splitlines()) == 6
