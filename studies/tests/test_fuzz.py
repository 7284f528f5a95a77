"""The fuzzer's short form: a few cases of each kind, and whether it finds what it looks for."""

import contextlib
import functools
import itertools
import json
import shutil
import sys
import threading
import types
from argparse import ArgumentParser

import pytest

from spectral_fairseq.embeddings import TABLES
from spectral_fairseq.heads import HEADS
from studies import work_folder
from studies.fuzz import __main__ as campaign
from studies.fuzz import data, files, forks, kills, space, training
from tests.checkpoints import hostile
from tests.conftest import PACKAGE


@pytest.fixture(scope="module")
def server(fork_server):
    with fork_server.after("studies.fuzz.forks:import_plugin") as server:
        yield server


@pytest.fixture(scope="module")
def corpora(server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    data.write(folder, lambda argv: forks.run(server, argv, folder))
    return folder


@pytest.fixture
def options(server, fork_server, corpora, tmp_path):
    return training.Options(server, fork_server, corpora, tmp_path / "case")


def test_the_space_covers_what_is_registered():
    cases = [space.draw(number) for number in range(3000)]
    words = {word for case in cases for word in case.argv}
    pairs = {pair for case in cases for pair in zip(case.argv, case.argv[1:])}
    assert {("--embedding-type", kind.kind) for kind in TABLES} <= pairs
    assert {("--output-head", kind.kind) for kind in HEADS} <= pairs
    assert set(space._architectures()) | set(space._criterions()) <= words
    unknown = {"--nt-asgd-start", "--nt-asgd-stop"}  # texts of no known form, or rare
    assert space._our_flags() - words <= unknown | {
        name for name in space._our_flags() if name not in _drawable()
    }


def _drawable():
    """Our flags for which a value can be drawn."""
    classes = space._classes()
    registered = [
        *(space._model(arch) for arch in space._architectures()),
        *(classes.criterions[name] for name in space._criterions()),
        *(classes.optimizers[name] for name in space.OPTIMIZERS),
    ]
    flags = {name: action for one in registered for name, action in space._flags(one).items()}
    return {name for name, action in flags.items() if space._given(action, name, _Any())}


class _Any:
    def random(self):
        return 1.0

    def choice(self, values):
        return values[0]


def test_a_case_is_its_number():
    assert space.draw(7) == space.draw(7) != space.draw(8)


LM = space.Case(
    "language",
    "language_modeling",
    [*files.TRAINING, "--rdrop-weight", "1"],
)


def test_a_training_and_its_reloads(options):
    found = options.run(0, LM)
    assert found["outcome"] == forks.DONE
    assert set(found["commands"].values()) == {forks.DONE} and len(found["commands"]) == 7


@pytest.mark.parametrize("number", range(4))
def test_drawn_options(options, number):
    found = options.run(number)
    assert found["outcome"] not in training.FAILURES, found


def test_a_wrong_loss_is_found(options, monkeypatch):
    losses = iter((5.0, 5.1))
    monkeypatch.setattr(training, "loss_of", lambda _: next(losses, 5.0))
    found = options.run(0, LM)
    assert found["outcome"] == training.UNLIKE
    assert found["error"] == "validate: loss 5.1, in training 5.0"


OF_FAIRSEQ = ("transformer_lm", "adaptive_loss", "--adaptive-softmax-cutoff", "10")
OF_OURS = ("transformer_lm_sc", "spectrum_control", "--spectrum-weight", "0.1")


@pytest.mark.slow
@pytest.mark.parametrize("flags, outcome", [(OF_FAIRSEQ, forks.FAIRSEQ), (OF_OURS, training.NAN)])
def test_losses_that_are_not_finite(options, monkeypatch, flags, outcome):
    arch, criterion, *more = flags
    argv = [*files.TRAINING[6:], "--arch", arch, "--criterion", criterion, *more]
    argv += ["--task", "language_modeling", "--tokens-per-sample", "16"]
    monkeypatch.setattr(training, "loss_of", lambda _: float("nan"))
    found = options.run(0, space.Case("language", "language_modeling", argv))
    assert found["outcome"] == outcome, found["error"]


def test_nothing_is_killed_for_what_has_ended(server, tmp_path, monkeypatch):
    fork = forks.Fork(server, ["spectral-fairseq", "--version"], tmp_path)
    assert fork.wait(60)
    monkeypatch.setattr(forks.os, "kill", None)
    fork.kill()


@pytest.mark.parametrize("status, printed, outcome", [
    (0, "", forks.DONE),
    (2, "spectral-fairseq analyze: error: expected a; found b. C.", forks.REFUSED),
    (2, "usage: train.py\ntrain.py: error: unrecognized arguments: --x", forks.COMMAND_LINE),
    (1, "{ours}{raised}spectral_fairseq.errors.DataError: expected a; found b. C.", forks.REFUSED),
    (1, "{theirs}{ours}{raised}KeyError: 1", forks.TRACEBACK),
    (1, "{ours}{theirs}{raised}KeyError: 1", forks.FAIRSEQ),
    (1, "{ours}{theirs}{torch}{raised}KeyError: 1", forks.FAIRSEQ),
    (1, "{theirs}{ours}{torch}{raised}KeyError: 1", forks.TRACEBACK),
    (134, "terminate called", forks.CRASH),
])  # fmt: skip
def test_how_an_end_is_judged(status, printed, outcome):
    frame = '  File "{}", line 1, in f\n    x\n'
    text = printed.format(
        ours=frame.format(PACKAGE / "heads" / "mixture.py"),
        theirs=frame.format("/lib/fairseq/trainer.py"),
        torch=frame.format("/lib/torch/nn/modules/module.py"),
        raised="",
    )
    assert forks.judged(status, text)[0] == outcome


@pytest.mark.parametrize("maker", [hostile.code_in_a_setting, files.foreign_token])
def test_hostile_files_through_all_commands(maker, server, corpora, tmp_path):
    number = [kind.make for kind in files.KINDS].index(maker)
    saved = tmp_path / "intact"
    argv = ["fairseq-train", corpora / "language", *training.PLUGIN, *files.TRAINING]
    argv += ["--cpu", "--max-update", 1, "--save-dir", saved]
    assert forks.run(server, argv, tmp_path).outcome == forks.DONE
    one = files.Hostile(
        server, saved / "checkpoint_last.pt", corpora / "language", tmp_path / "case"
    )
    found = one.run(number)
    assert found["outcome"] not in files.FAILURES, found


def test_a_killed_training_goes_on(server, corpora, tmp_path):
    found = kills.Kills(server, corpora / "language", tmp_path).run(0)
    assert found["outcome"] == forks.DONE, found
    alone, killed = tmp_path / "alone-awd_lstm_ptb", tmp_path / "killed"
    early = min(alone.glob("checkpoint_*_*.pt"), key=lambda path: path.stat().st_mtime)
    shutil.copy(early, killed / "checkpoint_last.pt")
    assert not kills._equal(alone, killed)


def test_a_training_killed_after_its_last_update_has_ended(server, corpora, tmp_path, monkeypatch):
    def let_it_end(self, fork, update):
        assert fork.wait(60)
        fork.kill = fork._running.wait
        fork.wait = lambda _: False  # as it is between the last checkpoint and the exit

    monkeypatch.setattr(kills.Kills, "_wait_for", let_it_end)
    found = kills.Kills(server, corpora / "language", tmp_path).run(1)
    assert found["outcome"] == kills.ENDED, found


def test_a_campaign_goes_on_where_it_stopped(tmp_path):
    record = tmp_path / "fuzz.jsonl"
    cases = list(itertools.islice(campaign.next_cases([]), 25))
    assert {kind for kind, _ in cases} == {"options", "file", "kill"}
    lines = [campaign.kept(forks.line(*case, forks.DONE, argv=["--x"])) for case in cases[:10]]
    assert "argv" not in lines[0]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    record.write_text(text + text[:20])  # the last line is cut off
    kept = campaign.lines_of(record)
    assert list(itertools.islice(campaign.next_cases(kept), 15)) == cases[10:]
    assert "| hostile files | 5 | 5 |" in campaign.summary(kept)
    lines[3] = campaign.kept(forks.line(*cases[3], forks.TRACEBACK, argv=["--x"]))
    assert lines[3]["argv"] == ["--x"]
    assert "Failures: 1." in campaign.summary(lines)


def test_a_second_campaign_on_a_record_is_refused(tmp_path, monkeypatch, capsys):
    record = tmp_path / "fuzz.jsonl"
    monkeypatch.setattr(sys, "argv", ["fuzz", "--minutes", "0", "--record", str(record)])
    with work_folder.alone_with(record, ArgumentParser()), pytest.raises(SystemExit):
        campaign.main()
    assert f"no other run that writes {record}" in capsys.readouterr().err
    assert not record.exists()


def test_failures_stay_in_the_record_until_they_are_tried_again(tmp_path, monkeypatch):
    @contextlib.contextmanager
    def runners(folder):
        yield {
            kind: lambda number, kind=kind: forks.line(kind, number, forks.DONE)
            for kind in campaign.TURN
        }

    monkeypatch.setattr(campaign, "runners", runners)
    seconds = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: next(seconds))
    monkeypatch.setattr(campaign, "time", clock)
    record = tmp_path / "fuzz.jsonl"
    failed = campaign.kept(forks.line(campaign.TURN[0], 0, forks.TRACEBACK))
    record.write_text(json.dumps(failed) + "\n")
    campaign.campaign(0, record, 1)
    assert campaign.lines_of(record) == [failed]
    campaign.campaign(0.1, record, 1)  # six readings of the clock
    lines = campaign.lines_of(record)
    assert len(lines) == 5 and {line["outcome"] for line in lines} == {forks.DONE}


def test_cases_side_by_side_are_done_once(tmp_path, monkeypatch):
    together = threading.Barrier(2, timeout=60)

    @contextlib.contextmanager
    def runners(folder):
        together.wait()

        def run(kind, number):
            if number == 30:
                raise RuntimeError("stop")
            return forks.line(kind, number, forks.DONE, folder=folder.name)

        kinds = ("options", "file", "kill")
        yield {kind: functools.partial(run, kind) for kind in kinds}

    monkeypatch.setattr(campaign, "runners", runners)
    record = tmp_path / "build" / "fuzz.jsonl"
    with pytest.raises(RuntimeError, match="stop"):
        campaign.campaign(minutes=10, record=record, at_once=2)
    lines = campaign.lines_of(record)
    numbers = [line["number"] for line in lines]
    assert len(set(numbers)) == len(numbers) >= 30
    assert set(range(30)) <= set(numbers)
    assert {"options", "file", "kill"} == {line["kind"] for line in lines}
