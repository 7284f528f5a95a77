"""The table of docs/compatibility.md is that of the record, and the record that of the cells."""

import copy
import sys
from argparse import ArgumentParser

import pytest

from spectral_fairseq.commands import doctor
from studies import work_folder
from studies.matrix import __main__ as matrix
from studies.matrix import architectures, existing, frameworks, page, steps
from studies.matrix.cells import CELLS, EXISTING, NONE, UPSTREAM, Cell
from tests.conftest import ROOT

FIRST, SECOND = "py3.10-torch1.12.1-numpy1.23.5", "py3.12-torch2.6.0-numpy2.4.6"


def cell(name, **more):
    versions = {"python": name, "fairseq": "ve-fairseq 0.12.3", "torch": "2", "numpy": "2"}
    return {"date": "2026-01-01", "versions": versions, **more}


def test_the_page_shows_the_record():
    assert page.block(page.read_record()) in page.PAGE.read_text("utf-8")


def test_a_second_run_does_not_write_over_the_record(tmp_path, monkeypatch, capsys):
    record = tmp_path / "record.json"
    for module in (matrix, architectures):
        monkeypatch.setattr(module, "RECORD", record)
        monkeypatch.setattr(sys, "argv", ["a program"])
        with work_folder.alone_with(record, ArgumentParser()), pytest.raises(SystemExit):
            module.main()
        assert f"no other run that writes {record}" in capsys.readouterr().err


def test_the_record_is_of_known_cells():
    record = page.read_record()
    assert set(record) <= set(CELLS)
    for name, found in record.items():
        assert found["versions"]["torch"].split("+")[0] == CELLS[name].torch
        assert found["versions"]["numpy"] == CELLS[name].numpy


def test_failures_are_shown():
    record = {
        SECOND: cell(SECOND, loss=1.0, reads={FIRST: "fairseq-generate: no"}),
        FIRST: cell(
            FIRST,
            loss=1.0,
            tests={"passed": 9, "skipped": 2, "failed": 1, "failures": ["tests.test_a.test_b"]},
            reads={FIRST: "", SECOND: ""},
        ),
        "py3.9-torch1.12.1-numpy1.23.5": cell("py3.9", error="installation: no such package"),
    }
    rows = page.block(record).splitlines()
    assert [row.split(" | ")[0] for row in rows[3:6]] == [
        "| py3.9",
        f"| {FIRST}",
        f"| {SECOND}",
    ]
    assert rows[4].endswith("| 9, 1 failed |") and rows[5].endswith("|  |")
    assert rows[6:-1] == [
        "",
        "Of 3 pairs of rows, 2 read each other's checkpoints.",
        "",
        "What failed:",
        "",
        "- py3.9-torch1.12.1-numpy1.23.5: installation: no such package",
        f"- {FIRST}: the test `tests.test_a.test_b`",
        f"- {SECOND}: {FIRST}: fairseq-generate: no",
    ]


@pytest.mark.parametrize("one", CELLS.values(), ids=CELLS)
def test_the_pins_of_a_cell_replace_those_of_the_project(one):
    lines = one.constraints((ROOT / "constraints.txt").read_text("utf-8")).splitlines()
    for package in ("torch", "torchaudio", "numpy", "sympy"):
        found = [line for line in lines if line.startswith(f"{package}==")]
        assert found == [f"{package}=={getattr(one, package)}"]
    assert any(line.startswith("fairseq==") for line in lines)


def test_a_package_without_a_pin_is_refused():
    with pytest.raises(ValueError, match="does not pin torchaudio"):
        Cell("3.9", "1", "1", "1").constraints("torch==2\n")


class Installation:
    """One that does nothing but fail where it is told."""

    def __init__(self, cell, failing=""):
        self.cell, self.failing = cell, failing
        self.read_, self.checkpoint = [], ROOT / "setup.py"  # which exists

    def _step(self, name, result):
        if name == self.failing:
            raise steps.Failure("no")
        return result

    def is_made(self):
        return self.failing != "install"

    def install(self):
        return self._step("install", {"python": self.cell.python, "torch": "", "numpy": ""})

    def train(self):
        return self._step("train", 2.5)

    def test(self, selection, flags):
        return self._step("test", {"passed": 1, "skipped": 0, "failed": 0, "failures": []})

    def read(self, checkpoint, loss):
        self.read_.append(loss)
        self._step("read", None)


@pytest.mark.parametrize("step", ["install", "train", "test"])
def test_the_step_that_failed_is_recorded(step):
    found = matrix.run_cell(Installation(CELLS[FIRST], step), "fast", "")
    assert found["error"].endswith(": no") and ("loss" in found) is (step == "test")


def test_every_cell_reads_what_it_has_not_read():
    both = {name: Installation(CELLS[name]) for name in (FIRST, SECOND)}
    record = {name: matrix.run_cell(one, "fast", "") for name, one in both.items()}
    record[FIRST]["reads"] = {FIRST: ""}
    before = copy.deepcopy(record)
    assert list(matrix.read_others(both, record)) == [
        (FIRST, SECOND, ""),
        (SECOND, FIRST, ""),
        (SECOND, SECOND, ""),
    ]
    assert record == before and both[SECOND].read_ == [2.5, 2.5]
    both[SECOND].failing = "read"
    assert (SECOND, FIRST, "no") in list(matrix.read_others(both, record))


def test_a_checkpoint_of_a_cell_that_is_not_recorded_is_left_alone():
    both = {name: Installation(CELLS[name]) for name in (FIRST, SECOND)}
    record = {FIRST: matrix.run_cell(both[FIRST], "fast", "")}
    assert list(matrix.read_others(both, record)) == [(FIRST, FIRST, "")]


def test_a_cell_that_is_repeated_is_read_again():
    record = {FIRST: cell(FIRST, reads={SECOND: ""}), SECOND: cell(SECOND, reads={FIRST: ""})}
    matrix.forget(record, FIRST)
    assert list(record) == [SECOND] and record[SECOND]["reads"] == {}


def test_counts_are_those_of_pytests_report(tmp_path):
    report = tmp_path / "report.xml"
    case = '<testcase classname="tests.test_a" name="{}">{}</testcase>'
    cases = (case.format(*one) for one in (("a", ""), ("b", "<skipped/>"), ("c", "<error/>")))
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    found = {"passed": 1, "skipped": 0, "failed": 0, "failures": []}
    steps.add_counts(found, report)
    assert found == {"passed": 2, "skipped": 1, "failed": 1, "failures": ["tests.test_a.c"]}


OTHERS = [one for one in CELLS.values() if one.fairseq not in ("", NONE)]
ALONE = [one for one in CELLS.values() if one.fairseq == NONE]


@pytest.mark.parametrize("one", ALONE, ids=[one.name for one in ALONE])
def test_torch_alone_is_installed_and_tested_without_fairseq(one, tmp_path, monkeypatch):
    commands = []

    def call(self, argv):
        commands.append(argv)
        return '{"fairseq": null}'

    monkeypatch.setattr(steps, "find_python", lambda version: f"python{version}")
    monkeypatch.setattr(steps.Installation, "_call", call)
    monkeypatch.setattr(steps, "add_counts", lambda *_: None)
    installation = steps.Installation(one, tmp_path / "cell")
    assert "loss" not in matrix.run_cell(installation, "fast", "")
    made = [argv for argv in commands if argv[0] == "make"]
    assert made and all("FAIRSEQ=no" in argv for argv in made)
    (tmp_path / "cell/venv").mkdir()
    (tmp_path / "cell/venv/.installed").touch()
    record = {one.name: {}, FIRST: {"loss": 1.0}}
    both = {one.name: installation, FIRST: Installation(CELLS[FIRST])}
    assert one.name not in [reader for reader, *_ in matrix.read_others(both, record)]


def test_a_changed_file_of_an_existing_fairseq_is_found(tmp_path, monkeypatch):
    files = iter([{"fairseq/a.py": "1"}, {"fairseq/a.py": "2"}])
    monkeypatch.setattr(existing.Existing, "_fairseq_files", lambda _: next(files))
    monkeypatch.setattr(existing.Existing, "_packages", lambda _: {})
    monkeypatch.setattr(existing.Existing, "make", lambda _: {})
    one = existing.Existing(CELLS[EXISTING[0]], tmp_path)

    def run(*argv):
        if "wheel" in argv:
            (one.folder / "wheels").mkdir(parents=True)
            (one.folder / "wheels" / "a.whl").touch()
        return ""

    monkeypatch.setattr(one, "_run", run)
    with pytest.raises(steps.Failure, match="changed files of fairseq"):
        one.check()


@pytest.mark.parametrize("one", OTHERS, ids=[one.name for one in OTHERS])
def test_another_fairseq_takes_the_place_of_the_usual_one(one, tmp_path, monkeypatch):
    commands = []

    def run(self, *argv):
        commands.append(argv)
        return '{"fairseq": "fairseq-fixed"}'

    monkeypatch.setattr(steps.Installation, "_make", lambda *_: "")
    monkeypatch.setattr(steps.Installation, "_run", run)
    monkeypatch.setattr(steps.Installation, "_call", lambda *_: "abcdef\n")
    clone = tmp_path / "clone"
    found = steps.Installation(one, tmp_path / "cell", clone).install()["fairseq"]
    assert found == ("upstream, commit abcdef" if one.fairseq == UPSTREAM else "fairseq-fixed")
    uninstall, install, _ = commands
    assert uninstall[-2:] == ("fairseq", "ve-fairseq")
    assert install[-1] == (clone if one.fairseq == UPSTREAM else one.fairseq)


def test_upstream_needs_a_clone(tmp_path, monkeypatch):
    monkeypatch.setattr(steps.Installation, "_make", lambda *_: "")
    (one,) = (one for one in OTHERS if one.fairseq == UPSTREAM)
    with pytest.raises(steps.Failure, match="--upstream FOLDER"):
        steps.Installation(one, tmp_path / "cell").install()


FROZEN = "numpy==2.4.6\ntorch==2.13.0+cpu\n"
WHEEL = "spectral-fairseq @ file:///wheels/spectral_fairseq-0.1.0-py3-none-any.whl\n"


def test_what_pip_added_to_an_environment_and_what_it_changed():
    before = existing.packages_of(FROZEN)
    assert set(before) == {"numpy", "torch"}
    assert existing.added_packages(before, existing.packages_of(FROZEN + WHEEL)) == [
        "spectral-fairseq"
    ]
    with pytest.raises(steps.Failure, match="numpy 2.4.6 became 1.26.4"):
        existing.added_packages(before, existing.packages_of(FROZEN.replace("2.4.6", "1.26.4")))
    with pytest.raises(steps.Failure, match="numpy 2.4.6 became nothing"):
        existing.added_packages(before, {"torch": "2.13.0+cpu"})


def test_environments_that_exist_are_on_the_page():
    assert set(EXISTING) <= set(CELLS)
    counts = {"passed": 3, "skipped": 0, "failed": 1, "failures": ["a"]}
    units = {"without": counts, "with": {**counts, "passed": 4}, "newly_failed": []}
    host = {"HEAD": {"units": units}, "v0.12.2": {"units": {**units, "newly_failed": ["b"]}}}
    found = {"date": "2026-01-01", "added": ["spectral-fairseq"], "host_tests": host}
    text = page.block({FIRST: cell("3.10", existing=found), SECOND: cell("3.12")})
    assert (
        "pip added spectral-fairseq, and changed nothing, beside ve-fairseq 0.12.3 with torch 2."
        in text
    )
    assert "| ve-fairseq 0.12.3 | 2 | units | the last commit | 3 of 4 | 4 of 5 | 0 |" in text
    assert "| ve-fairseq 0.12.3 | 2 | units | v0.12.2 | 3 of 4 | 4 of 5 | 1 |" in text
    assert matrix._failed({"existing": found})
    assert not matrix._failed({"existing": {**found, "host_tests": {"HEAD": host["HEAD"]}}})
    broken = {FIRST: cell("3.10", existing={"date": "2026-01-01", "error": "no"})}
    assert f"- {FIRST}: no" in page.block(broken)


def test_an_environment_that_fails_is_recorded():
    class Environment:
        def check(self):
            return {"added": ["spectral-fairseq"]}

        def host_tests(self):
            raise steps.Failure("no clone")

    assert matrix.run_existing(Environment(), False)["added"] == ["spectral-fairseq"]
    assert matrix.run_existing(Environment(), True)["error"] == "no clone"


def test_versions_of_the_frameworks_are_on_the_page():
    record = page.read_record()[frameworks.HOST].get("training", {})
    assert set(record) <= set(frameworks.FRAMEWORKS)
    of = {"transformers": "4.47.1", "accelerate": "1.2.1", "lightning": "", "date": "2026-01-01"}
    counts = {"passed": 3, "skipped": 1, "failed": 1, "failures": ["tests.training.a"]}
    found = {"one": {**of, **counts}, "other": {**of, "error": "no"}}
    text = page.block({FIRST: cell("3.11", training=found)})
    assert "| 4.47.1 | 1.2.1 |  | 3, 1 failed |" in text
    assert f"- {FIRST}: no" in text and f"- {FIRST}: the test `tests.training.a`" in text
    assert matrix._failed({"training": found})


@pytest.mark.parametrize("reports", [True, False])
def test_a_room_that_fails_is_recorded(reports, tmp_path, monkeypatch):
    """Tests that fail leave a report; a package that cannot be installed leaves none."""
    one = frameworks.FRAMEWORKS["transformers4.47.1-accelerate1.2.1"]
    room = frameworks.Room(one, CELLS[frameworks.HOST], tmp_path)
    commands = []

    def run(self, *argv):
        commands.append(argv)
        tests = argv[2] == "pytest"
        if tests and reports:
            case = '<testcase classname="tests.a" name="b"><failure/></testcase>'
            (room.folder / "tests.xml").write_text(f"<testsuite>{case}</testsuite>")
        if tests is reports:
            raise steps.Failure("no")
        return ""

    monkeypatch.setattr(steps.Installation, "_call", lambda *_: "")
    monkeypatch.setattr(steps.Installation, "_run", run)
    found = room.check()
    assert found.get("failures") == (["tests.a.b"] if reports else None)
    assert found.get("error") == (None if reports else "no")
    assert {"transformers==4.47.1", "accelerate==1.2.1", "torch==2.13.0"} < set(commands[0])


def test_what_doctor_says_was_tested_is_in_the_record():
    tested = [cell["versions"] for cell in page.read_record().values() if "tests" in cell]
    for name, (oldest, newest) in doctor.TESTED.items():
        found = sorted(tuple(map(int, one[name].split(".")[:2])) for one in tested)
        assert [oldest, newest] == [".".join(map(str, found[end])) for end in (0, -1)]
