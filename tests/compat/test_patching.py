"""How patches are applied and reported; each patch has a test of its own."""

import sys
import types
from pathlib import Path

import pytest

from spectral_fairseq import compat
from spectral_fairseq.compat import Status, patch_fairseq, patching
from spectral_fairseq.compat.patching import Overlay, Patch, apply_all, replaces, wrapping
from spectral_fairseq.plugin import trainer


def patch_twice():
    from fairseq import checkpoint_utils, file_io, options
    from fairseq.data import data_utils, iterators
    from fairseq.trainer import Trainer

    from spectral_fairseq import compat
    from spectral_fairseq.compat import patching
    from spectral_fairseq.plugin import trainer

    def places():
        functions = [
            data_utils.batch_by_size,
            data_utils.np,
            checkpoint_utils.load_checkpoint_to_cpu,
            checkpoint_utils.torch,
            iterators.BackgroundConsumer,
            options.parse_args_and_arch,
            file_io.PathManager.copy,
            Trainer.load_checkpoint,
        ]
        return [id(function) for function in functions]

    first = compat.patch_fairseq() + trainer.patch_for_features()
    before = places()
    assert compat.patch_fairseq() + trainer.patch_for_features() == first and places() == before
    patching._applied.clear()  # as if nothing was known of the first time
    again = compat.patch_fairseq() + trainer.patch_for_features()
    patching._applied.update({one.patch.name: one for one in first})
    assert places() == before
    return [one.status.value for one in again]


def test_patching_again_changes_nothing(patched):
    assert set(patched.call(patch_twice)) <= {"patched", "not needed"}


def test_every_patch_is_needed_or_not_and_says_why():
    applied = patch_fairseq() + trainer.patch_for_features()
    assert [one.patch for one in applied] == [*compat.PATCHES, *trainer.PATCHES]
    assert len({one.patch.name for one in applied}) == len(applied)
    assert [one for one in applied if one.status is Status.CANNOT] == []
    assert all(one.patch.reason.endswith(".") and one.detail for one in applied)


def test_the_page_lists_every_patch():
    page = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text("utf-8")
    (table,) = (part for part in page.split("\n\n") if part.startswith("| of | patches |"))
    rows = [row.split("|")[2].strip().split(", ") for row in table.splitlines()[2:]]
    defects, features = [name for row in rows[:-1] for name in row], rows[-1]
    assert sorted(defects) == sorted(one.name for one in compat.PATCHES)
    assert features == [one.name for one in trainer.PATCHES]


@pytest.fixture
def unapplied(monkeypatch):
    monkeypatch.setattr(patching, "_applied", {})
    return monkeypatch


def fail():
    raise AttributeError("no such function")


def test_an_unknown_fairseq_still_starts(unapplied):
    applied = apply_all((Patch("a", "A.", fail), Patch("b", "B.", lambda: "done")))
    assert [one.status for one in applied] == [Status.CANNOT, Status.PATCHED]
    assert "no such function" in applied[0].detail and applied[1].detail == "done"


def test_a_patch_that_is_not_needed_is_not_installed(unapplied):
    (applied,) = apply_all([Patch("a", "A.", fail, unneeded=lambda: "cured upstream")])
    assert (applied.status, applied.detail) == (Status.NOT_NEEDED, "cured upstream")


def test_without_fairseq_nothing_can_be_patched(unapplied):
    unapplied.setattr(patching, "why_not_importable", lambda: "no fairseq")
    found = {(one.status, one.detail) for one in patch_fairseq()}
    assert found == {(Status.CANNOT, "no fairseq")}


class Owner:
    def work(self):
        return ["original"]

    @classmethod
    def build(cls, parts):
        return [cls.__name__, *parts]

    @staticmethod
    def join(parts):
        return [*parts]


@pytest.fixture
def place(monkeypatch):
    """A module of which everything may be replaced, as ``place:Class.attribute``."""
    module = types.ModuleType("replaceable")
    module.Owner = type("Owner", (), dict(vars(Owner)))
    monkeypatch.setitem(sys.modules, "replaceable", module)
    return "replaceable:Owner"


def owner():
    return sys.modules["replaceable"].Owner


def first(original):
    return lambda *args: [*original(*args), "first"]


def second(original):
    return lambda *args: [*original(*args), "second"]


def test_two_wrappers_of_one_function_both_stay_and_each_is_applied_once(place):
    for _ in range(2):
        replaces({f"{place}.work": first})()
        replaces({f"{place}.work": second})()
    assert owner()().work() == ["original", "first", "second"]


def test_a_function_that_is_written_as_it_is_called_gets_what_it_replaces(place):
    @wrapping
    def third(*args, last="third", original):
        return [*original(*args), last]

    original = owner().work
    for _ in range(2):
        replaces({f"{place}.work": third})()
    assert owner()().work() == ["original", "third"]
    assert owner()().work.__name__ == "work" and owner().work.__wrapped__ is original


def test_a_patch_of_which_one_place_is_missing_changes_no_other(place):
    original = owner().work
    install = replaces({f"{place}.work": first, f"{place}.nothing": second})
    found = patching._apply(Patch("halves", "Tested.", install), None)
    assert found.status is Status.CANNOT and owner().work is original


def test_class_and_static_methods_stay_so(place):
    detail = replaces({f"{place}.build": first, f"{place}.join": first})()
    assert owner().build(["a"]) == ["Owner", "a", "first"]
    assert owner()().join(["a"]) == ["a", "first"]
    assert detail == "replaces replaceable.Owner.build, replaceable.Owner.join"


def test_an_overlay_changes_only_its_own_names():
    overlay = Overlay(sys, platform="none")
    assert overlay.platform == "none" and overlay.version is sys.version
    assert sys.platform != "none"
    with pytest.raises(AttributeError):
        _ = overlay.no_such_name
